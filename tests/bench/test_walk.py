"""What one call of attention takes beside its kernels does not grow. A ceiling is the count of the day
that it was written, and may only be lowered."""

from bench import walk


def test_a_compiled_call_walks_through_few_calls_files_and_objects():
    found = walk.compiled()
    ceilings = {"calls": 600, "files": 38, "objects": 23, "nodes": 2}
    assert found.keys() == ceilings.keys() and min(found.values()) > 0
    assert all(n <= ceilings[what] for what, n in found.items()), found


def test_an_eager_call_makes_few_calls_of_python():
    found = walk.eager(emulate=True, recipe="sage2-8b")
    assert 0 < found["calls"] <= 112 and found["files"] <= 15 and found["objects"] <= 11, found
    found = walk.eager()
    assert 0 < found["calls"] <= 6 and found["files"] <= 5, found


def test_the_walk_counts_what_the_library_calls_and_nothing_else():
    from sage_inductor.ops.recipe import NAMED

    assert walk.walk(lambda: sum(range(9))) == {"calls": 0, "files": 0, "objects": 0}
    found = walk.walk(lambda: NAMED["sage1"].encode())
    assert found["calls"] >= 1 <= found["files"] and found["objects"] >= 1
