"""Stages: what becomes of a graph in each, that one trace serves all, and a pipeline's schedule."""

import asyncio
import concurrent.futures
import itertools
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from support import op_by_op, relative_l1
from torch._dynamo.utils import counters
from torch.utils.checkpoint import checkpoint

import sage_inductor
from sage_inductor import Policy, Rule, SageOptionError, SageRefused, Schedule, backend, config
from sage_inductor.choose.decide import decide
from sage_inductor.ops.notes import warn_once
from sage_inductor.session import session
from sage_inductor.stages import by_stage, current

pytestmark = pytest.mark.usefixtures("graphs_run_op_by_op")

EDGE = [{"stage": "edge", "recipe": "off"}, {"recipe": "sage2-4b"}]
THREE = [
    {"stage": "edge", "recipe": "off"},
    {"stage": "warm", "layer": 0, "recipe": "sage1"},
    {"recipe": "sage2-4b"},
]
ALONE = {  # what is each stage's of THREE
    "edge": [{"recipe": "off"}],
    "warm": [{"layer": 0, "recipe": "sage1"}, {"recipe": "sage2-4b"}],
    None: [{"recipe": "sage2-4b"}],
}


class Layer(torch.nn.Module):
    def __init__(self, checkpointed=False):
        super().__init__()
        self.qkv = torch.nn.Linear(32, 96)
        self.checkpointed = checkpointed

    def attend(self, x):
        return F.scaled_dot_product_attention(*self.qkv(x).chunk(3, -1))

    def forward(self, x):
        if self.checkpointed:
            return x + checkpoint(self.attend, x, use_reentrant=False)
        return x + self.attend(x)


class Model(torch.nn.Module):
    def __init__(self, layers=2, **given):
        super().__init__()
        self.layers = torch.nn.ModuleList(Layer(**given) for _ in range(layers))

    def forward(self, x):
        for layer in self.layers:
            x = layer(x)
        return x


def options(policy=THREE, **given) -> dict:
    given = {"policy": policy, "emulate": True} | given
    return {f"sage.{k}": v for k, v in given.items()}


def compiled(model, policy=THREE, **given):
    return torch.compile(model, backend="sage", fullgraph=True, options=options(policy), **given)


def in_stage(stage, call, *args):
    with sage_inductor.stage(stage):
        return call(*args)


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def device(request):
    """Where a model runs; on a GPU `sage.emulate` runs the kernels."""
    return request.param


@pytest.fixture
def compilations(monkeypatch, graphs_run_op_by_op):
    """One entry for each graph that is given to Inductor."""
    found = []

    def count(self, gm, example_inputs):
        found.append([node.target for node in gm.graph.nodes])
        return original(self, gm, example_inputs)

    wrapper = backend.InductorWrapper
    original = wrapper.__call__
    monkeypatch.setattr(wrapper, "__call__", count)
    return found


@pytest.fixture
def own_cache():
    """What another test left in torch's may hold for fewer lengths: a graph of it, taken for a
    dynamic length, brings its guards along."""
    with (
        torch._inductor.config.patch(fx_graph_cache=False),
        torch._functorch.config.patch(enable_autograd_cache=False),
    ):
        yield


@pytest.mark.parametrize("dynamic", [False, True])
def test_one_trace_serves_all_stages_each_with_the_bits_of_a_model_compiled_for_it(
    dynamic, device, compilations
):
    check_one_trace(dynamic, device, compilations)


@pytest.mark.usefixtures("own_cache", "by_inductor")
def test_inductor_compiles_every_stage_of_one_trace_for_any_length(compilations):
    check_one_trace(True, "cpu", compilations, {"warm": ALONE["warm"]})


def check_one_trace(dynamic, device, compilations, policies=ALONE):
    model = Model().to(device)
    inputs = [torch.randn(1, 2, N, 32, device=device) for N in (70, 133)]
    alone = {}
    for stage, policy in policies.items():
        torch._dynamo.reset()
        run = compiled(model, policy, dynamic=dynamic)
        alone[stage] = [run(x) for x in inputs]
    torch._dynamo.reset()
    counters.clear()
    compilations.clear()
    run = compiled(model, dynamic=dynamic)
    in_stage("warm", run, inputs[0])  # the first call compiles all, whatever stage it is in
    if not dynamic:
        run(inputs[1])
    graphs = 1 if dynamic else 2
    for stage in (None, "edge", "warm", "edge", None, "a name of no rule", "warm"):
        named = stage if stage in ALONE else None
        for i, x in enumerate(inputs):
            found = in_stage(stage, run, x)
            if named in alone:
                torch.testing.assert_close(found, alone[named][i], rtol=0, atol=0)
            error = relative_l1(found, model(x))
            assert (error < 1e-5) == (named == "edge")
            assert named != "warm" or not torch.equal(found, run(x))
    assert counters["stats"]["unique_graphs"] == graphs and len(compilations) == 3 * graphs


def test_what_is_equal_in_two_stages_is_compiled_once(compilations, monkeypatch):
    def timed(call, settings):
        times = 1.0, 2.0 + (settings.stage == "same")  # measured for its rule's recipe alone, say
        return decide(call, settings)._replace(times=times)

    monkeypatch.setattr(backend, "decide", timed)
    policy = [
        {"stage": "edge", "recipe": "off"}, {"stage": "same", "recipe": "sage2-4b"},
        {"stage": "end", "recipe": "off"},
        {"stage": "elsewhere", "module": "decoder.*", "recipe": "off"}, {"recipe": "sage2-4b"},
    ]  # fmt: skip
    x = torch.randn(1, 2, 70, 32)
    run = compiled(Model(), policy)
    for stage, like in (("same", None), ("end", "edge"), ("elsewhere", None)):
        torch.testing.assert_close(in_stage(stage, run, x), in_stage(like, run, x), rtol=0, atol=0)
    assert len(compilations) == 2
    found = {(site.stage, site.recipe) for site in sage_inductor.report()}
    # Of "same" another rule is the reason.
    assert found == {(None, "sage2-4b"), ("same", "sage2-4b"), ("edge", None), ("end", None)}


def test_where_no_stage_changes_a_graph_nothing_is_looked_up_when_it_runs(monkeypatch):
    monkeypatch.setattr(backend, "by_stage", None)
    policy = [{"stage": "edge", "layer": 7, "recipe": "off"}, {"recipe": "sage1"}]
    compiled(Model(), policy)(torch.randn(1, 2, 70, 32))
    assert {(site.stage, site.recipe) for site in sage_inductor.report()} == {(None, "sage1")}


def test_lengths_of_a_stages_rule_are_guarded_from_the_first_call_on():
    policy = [{"stage": "edge", "length": [None, 100], "recipe": "off"}, {"recipe": "sage2-4b"}]
    model = Model()
    run = compiled(model, policy, dynamic=True)
    for N, stays in ((70, True), (133, False), (100, True), (101, False)):
        x = torch.randn(1, 2, N, 32)
        run(x)
        error = relative_l1(in_stage("edge", run, x), model(x))
        assert (error < 1e-5) == stays, (N, error)


@pytest.mark.usefixtures("own_cache", "by_inductor")
@pytest.mark.parametrize("checkpointed", [False, True])
def test_gradients_are_of_the_stage_that_ran(checkpointed):
    """Also where attention is in a graph nested in the model's. A backward is compiled when it
    first runs, after the forwards of all stages were."""
    model, x = Model(checkpointed=checkpointed), torch.randn(1, 2, 70, 32)
    given = {"policy": EDGE, "force": True}
    run = torch.compile(model, backend="sage", options=options(**given), fullgraph=True)
    cotangent = torch.randn(1, 2, 70, 32)
    kept = cotangent.clone()

    def gradients(call):
        model.zero_grad()
        call(x).backward(cotangent)
        return [p.grad.clone() for p in model.parameters()]

    exact = gradients(model)
    for stage in ("edge", None, "edge"):
        error = max(map(relative_l1, in_stage(stage, gradients, run), exact))
        assert (error < 1e-4) == (stage == "edge") and error < 0.5, error
        torch.testing.assert_close(cotangent, kept, rtol=0, atol=0)


def test_a_call_is_dispatched_to_the_variant_of_its_stage():
    run = by_stage({None: lambda x: x, "edge": lambda x: -x})
    assert (run(1), in_stage("edge", run, 1), in_stage("other", run, 1)) == (1, -1, 1)


def test_a_stage_is_its_threads_and_its_tasks_and_ends_with_its_block():
    def name_in(stage):
        with sage_inductor.stage(stage):
            return current()

    async def task(name):
        with sage_inductor.stage(name):
            await asyncio.sleep(0.01)
            return current()

    async def tasks():
        return await asyncio.gather(task("a"), task("b"))

    with sage_inductor.stage("outer"):
        with concurrent.futures.ThreadPoolExecutor(2) as pool:
            assert pool.submit(current).result() is None
            assert list(pool.map(name_in, "ab")) == ["a", "b"]
        assert asyncio.run(tasks()) == ["a", "b"]
        with pytest.raises(KeyError), sage_inductor.stage(None):
            assert current() is None
            raise KeyError
        assert current() == "outer"
    assert current() is None

    @sage_inductor.stage("decorated")
    def decorated(depth):
        assert current() == "decorated"
        return depth and decorated(depth - 1)

    decorated(2)
    assert current() is None


@pytest.mark.parametrize("name", ["", 3])
def test_a_stage_that_has_no_name_is_refused(name):
    with pytest.raises(ValueError, match="a stage must have a name that is a string"):
        with sage_inductor.stage(name):
            pass
    with pytest.raises(ValueError, match="rule 1: a stage must have a name"):
        Policy([Rule("off", stage=name)])


# -- who else decides ----


def test_a_function_says_which_stages_it_knows():
    def policy(call):
        return "off" if call.stage == "edge" else "sage2-4b"

    model, x = Model(), torch.randn(1, 2, 70, 32)
    run = compiled(model, policy)
    torch.testing.assert_close(in_stage("edge", run, x), run(x), rtol=0, atol=0)
    torch._dynamo.reset()
    policy.stages = ("edge",)
    run = compiled(model, policy)
    assert relative_l1(in_stage("edge", run, x), model(x)) < 1e-5 < relative_l1(run(x), model(x))
    policy.stages = "edge"
    with pytest.raises(SageOptionError, match="stages must be a tuple of names, got 'edge'"):
        compiled(model, policy)(torch.randn(1, 2, 71, 32))


def test_explain_tells_of_every_stage_and_runs_none_of_them():
    model, x = Model(), torch.randn(1, 2, 70, 32)
    report = sage_inductor.explain(model, options=options())(x)
    assert report.verdict == (
        "2 of 2 attention calls use sage2-4b; in edge 2 stay: the policy says off; "
        "in warm 1 uses sage1"
    )
    expected = [("sage2-4b", None)] * 2 + [(None, "edge")] * 2 + [("sage1", "warm")]
    assert [(site.recipe, site.stage) for site in report] == expected
    assert [each["stage"] for each in report.to_dicts()] == [stage for _, stage in expected]
    header, _, *rows = str(report).splitlines()[2:]
    assert header.split()[-3:] == ["stage", "recipe", "reason"]
    assert [row.split("none", 1)[1].split()[0] for row in rows] == ["sage2-4b", "edge", "warm"]
    plain = sage_inductor.explain(model, options=options([]))(x)
    assert "stage" not in str(plain) and "stage" not in plain._repr_html_()
    assert "stage" in report._repr_html_()


def test_an_explained_model_computes_what_it_computes_in_no_stage():
    seen, x = [], torch.randn(1, 2, 70, 32)

    class Watched(Model):
        def forward(self, x):
            out = super().forward(x)
            torch._dynamo.graph_break()
            seen.append(out)
            return out

    model = Watched()
    sage_inductor.explain(model, options=options())(x)
    torch.testing.assert_close(seen[0], compiled(Model.forward)(model, x), rtol=0, atol=0)


def test_the_report_tells_of_a_stage_that_no_rule_names():
    x = torch.randn(1, 2, 70, 32)
    run = compiled(Model())
    in_stage("egde", run, x)
    note = 'stage "egde" is named by no rule of a policy'
    assert note in str(sage_inductor.report()) and 'stage "edge"' not in str(sage_inductor.report())
    torch._dynamo.reset()
    assert not session().stages
    run(x)
    assert note not in str(sage_inductor.report())
    torch._dynamo.reset()
    run = compiled(Model(), [{"stage": "egde", "recipe": "off"}])
    in_stage("egde", run, x)
    assert note not in str(sage_inductor.report())


def test_an_eager_call_is_decided_in_the_stage_in_force():
    q, k, v = torch.randn(3, 1, 2, 70, 32)
    exact = F.scaled_dot_product_attention(q, k, v)
    with config.patch(policy=Policy([Rule("off", stage="edge")]), emulate=True):
        for stage in (None, "edge", None):
            found = in_stage(stage, sage_inductor.attention, q, k, v)
            assert torch.equal(found, exact) == (stage == "edge")


def test_under_inductor_rules_of_a_stage_never_hold_and_a_warning_says_so(caplog):
    model, x, policy = Model(), torch.randn(1, 2, 70, 32), Policy([Rule("off", stage="edge")])
    with config.patch(rewrite_inductor=True, emulate=True, policy=policy):
        run = torch.compile(model, backend="inductor")
        in_stage("edge", run, x)
        assert relative_l1(in_stage("edge", run, x), model(x)) > 1e-3
        warn_once.cache_clear()
    assert caplog.text.count('need backend="sage"') == 1


@torch.no_grad()
def test_stages_keep_the_blocks_of_their_own_rules():
    """In one all, in one three tenths, in one fewer in the second layer."""
    recipe, keep = "sage2-8b-per-token", {"top_k": 0.3, "similarity": 0}
    policy = [
        {"stage": "edge", "recipe": recipe},
        {"stage": "middle", "layer": 1, "recipe": recipe, "keep": {**keep, "top_k": 0.1}},
        {"recipe": recipe, "keep": keep},
    ]
    alone = {"edge": policy[:1], "middle": policy[1:], None: policy[2:]}
    model, x = Model(), torch.randn(1, 2, 700, 32).cumsum(2) / 4
    run = compiled(model, policy)
    in_stage("middle", run, x)  # the first call compiles all
    sites = [(x.stage, x.module[-1], x.decision.selection) for x in sage_inductor.report()]
    told = [(stage, layer, selection and selection.top_k) for stage, layer, selection in sites]
    edge = [("edge", "0", None), ("edge", "1", None)]
    assert told == [(None, "0", 0.3), (None, "1", 0.3), *edge, ("middle", "1", 0.1)]
    found = {stage: in_stage(stage, run, x) for stage in ("middle", None, "edge")}
    for stage, rules in alone.items():
        torch._dynamo.reset()
        by_itself = compiled(model, [{**rule, "stage": None} for rule in rules])(x)
        torch.testing.assert_close(found[stage], by_itself, rtol=0, atol=0)
    for one, other in itertools.combinations(found.values(), 2):
        assert relative_l1(one, other) > 1e-5


@torch.no_grad()
def test_a_region_that_is_compiled_once_is_in_each_stage_what_its_rules_say():
    """AOTAutograd keeps what it traced by the region's name."""
    region = torch.compiler.nested_compile_region(lambda x: F.scaled_dot_product_attention(x, x, x))
    x = torch.randn(1, 2, 64, 32)
    with op_by_op(split=True):
        run = compiled(lambda x: region(x) + region(x), EDGE)
        assert relative_l1(run(x), 2 * region(x)) > 1e-3
        torch.testing.assert_close(in_stage("edge", run, x), 2 * region(x))


def test_strict_is_about_every_stage():
    policy = [{"stage": "edge", "recipe": "sage1"}, {"recipe": "off"}]
    x = torch.randn(1, 2, 70, 32)
    given = options(policy, emulate=False, strict=True)
    message = r"2 attention calls stay as they were: layers\.\* x2: on CPU"
    with pytest.raises(SageRefused, match=message):
        torch.compile(Model(), backend="sage", options=given)(x)


def test_a_stage_that_begins_in_a_compiled_function_is_the_one_that_runs():
    """Dynamo breaks the graph there."""
    model = Model()

    def function(x):
        with sage_inductor.stage("edge"):
            return model(x)

    x = torch.randn(1, 2, 70, 32)
    run = torch.compile(function, backend="sage", options=options(EDGE))
    for _ in range(2):
        assert relative_l1(run(x), model(x)) < 1e-5
    assert current() is None


# -- a pipeline's schedule ----


def stages_of(schedule, steps: int) -> list[str | None]:
    """Of each step of a run, as a pipeline calls it."""
    pipe, found = SimpleNamespace(num_timesteps=steps), []
    for step in range(steps):
        found.append(current())
        given = {"latents": step}
        assert schedule(pipe, step, 1000 - step, given) is given
    return found


@pytest.fixture
def contained():
    with sage_inductor.stage(None):
        yield


def test_a_schedule_names_the_stage_of_each_step_and_rewinds_itself(contained, caplog):
    schedule = Schedule(edge=(3, 2), warm=(4, 0))
    for steps in (10, 5, 4, 12):
        at = lambda i: "edge" if i < 3 or i >= steps - 2 else "warm" if i < 4 else None  # noqa: B023, E731
        assert stages_of(schedule, steps) == list(map(at, range(steps)))
    assert current() == "edge"
    for ends, expected in (((0, 1), [None, None, "end"]), ((1, 0), ["end", None, None])):
        schedule = Schedule(end=ends)
        for _ in range(2):
            assert stages_of(schedule, 3) == expected
    assert session().stages == {"edge", "warm", "end"} and not caplog.records


def test_a_step_that_ran_in_another_stage_is_warned_of(contained, caplog):
    schedule = Schedule(edge=(2, 0))
    with concurrent.futures.ThreadPoolExecutor(1) as pool:
        found = pool.submit(stages_of, schedule, 4).result()
    assert found == [None, "edge", None, None]
    (record,) = caplog.records
    message = "step 0 of 4 ran in stage None, not in 'edge': call the pipeline in `with schedule:`"
    assert message in record.getMessage()


def test_a_schedules_stages_end_with_it(contained):
    Schedule(dropped=(1, 0))
    assert current() is None
    with sage_inductor.stage("outer"):
        first = Schedule(first=(1, 0))
        second = Schedule(second=(2, 0))
        assert stages_of(second, 2) == ["second"] * 2 and current() == "second"
        del second
        assert current() == "first"
        del first
        assert current() == "outer"
    found = stages_of(Schedule(edge=(1, 1)), 3)
    assert found == ["edge", None, "edge"] and current() is None


def test_a_schedule_that_another_thread_made_begins_with_its_block(contained, caplog):
    with concurrent.futures.ThreadPoolExecutor(1) as pool:
        schedule = pool.submit(Schedule, edge=(2, 0)).result()
    assert current() is None
    with sage_inductor.stage("outer"):
        for _ in range(2):
            with pytest.raises(KeyError), schedule as given:
                assert given is schedule
                assert stages_of(schedule, 4) == ["edge", "edge", None, None]
                raise KeyError  # a pipeline's error, whose traceback holds the schedule
            assert current() == "outer"
    assert not caplog.records


@pytest.mark.parametrize("edge", [5, (1, -1), (1, 2, 3), (0.1, 0)])
def test_a_schedule_of_anything_else_than_two_numbers_is_refused(edge):
    with pytest.raises(ValueError, match="^Schedule: "):
        Schedule(edge=edge)


def test_a_pipeline_that_does_not_know_its_steps_is_refused(contained):
    with pytest.raises(ValueError, match="SimpleNamespace.num_timesteps must be the number"):
        Schedule(edge=(1, 1))(SimpleNamespace(), 0, 1000, {})


def wan(transformer, steps: int, callback=None):
    """The latents of a small Wan pipeline, with guidance: two calls of its transformer a step."""
    from diffusers import FlowMatchEulerDiscreteScheduler, WanPipeline

    pipe = WanPipeline(
        tokenizer=None, text_encoder=None, vae=None, transformer=transformer,
        scheduler=FlowMatchEulerDiscreteScheduler(shift=3.0),
    )  # fmt: skip
    pipe.set_progress_bar_config(disable=True)
    generator = torch.Generator().manual_seed(0)
    prompts = torch.randn(2, 1, 6, 16, generator=generator).to(transformer.device)
    return pipe(
        prompt_embeds=prompts[0], negative_prompt_embeds=prompts[1], height=32, width=32,
        num_frames=5, num_inference_steps=steps, guidance_scale=5.0, output_type="latent",
        generator=generator, callback_on_step_end=callback,
    ).frames  # fmt: skip


@pytest.mark.models
@torch.no_grad()
def test_a_wan_pipeline_goes_from_stage_to_stage_without_compiling(
    device, contained, compilations, caplog, monkeypatch
):
    """Each call alone, for the same inputs: what 20 steps add up may cancel."""
    diffusers = pytest.importorskip("diffusers")
    # cuDNN chooses an algorithm by the memory that is free: TF32 of another one is as far off as INT8.
    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", False)
    transformer = diffusers.WanTransformer3DModel(
        patch_size=(1, 2, 2), num_attention_heads=2, attention_head_dim=12, in_channels=4,
        out_channels=4, text_dim=16, freq_dim=16, ffn_dim=32, num_layers=1,
    ).eval().to(device)  # fmt: skip
    counters.clear()
    transformer.compile(backend="sage", options=options(), fullgraph=True)
    wan(transformer, 1)
    assert counters["stats"]["unique_graphs"] == 1 and len(compilations) == 3
    counters.clear()
    run, calls = transformer._compiled_call_impl, []

    def watched(**given):
        calls.append((current(), given, run(**given)))
        return calls[-1][2]

    def again(given):
        return run(**given)[0]

    monkeypatch.setattr(transformer, "_compiled_call_impl", watched)
    wan(transformer, 20, Schedule(edge=(5, 2), warm=(8, 0)))
    steps = ["edge"] * 5 + ["warm"] * 3 + [None] * 10 + ["edge"] * 2
    assert [stage for stage, *_ in calls] == [stage for stage in steps for _ in range(2)]
    for stage, given, (out,) in calls[::3]:
        off = {each: relative_l1(out, in_stage(each, again, given)) for each in ALONE}
        off["exact"] = relative_l1(out, transformer.forward(**given)[0])
        near = {each for each, error in off.items() if error < 1e-5}
        assert near == {stage} | ({"exact"} if stage == "edge" else set()), off
    assert not counters["stats"] and len(compilations) == 3  # nothing was traced
    assert "ran in stage" not in caplog.text


@pytest.mark.gpu
@torch.no_grad()
def test_stages_alternate_under_cuda_graphs_with_new_data(compilations):
    model = Model(3).cuda().half()
    inputs = [torch.randn(1, 2, 4096, 32, device="cuda", dtype=torch.float16) for _ in range(7)]

    def compiled(policy):
        given = options(policy, mode="reduce-overhead")
        return torch.compile(model, backend="sage", options=given, fullgraph=True)

    alone = {}
    for stage, policy in ALONE.items():
        torch._dynamo.reset()
        run = compiled(policy)
        alone[stage] = [run(x).clone() for x in inputs]
    torch._dynamo.reset()
    counters.clear()
    compilations.clear()
    run = compiled(THREE)
    for turn in range(3):
        for i, x in enumerate(inputs):
            stage = ("edge", "warm", None)[(turn + i) % 3]
            torch.compiler.cudagraph_mark_step_begin()
            found = in_stage(stage, run, x).clone()
            torch.testing.assert_close(found, alone[stage][i], rtol=0, atol=0)
    assert counters["stats"]["unique_graphs"] == 1 and len(compilations) == 3
