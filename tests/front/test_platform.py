"""Windows as far as it can be had here: POSIX's modules and functions are gone, and `sys.platform` is
another. torch, Triton and what they import stay Linux's, so it says nothing of a real Windows."""

import subprocess
import sys

ON_WINDOWS = """
import os, sys
import filelock, torch, torch._inductor.compile_fx, torch.nn.functional as F, triton
for name in ("fcntl", "grp", "posix", "pwd", "resource", "termios"):
    sys.modules[name] = None
for name in ("fork", "geteuid", "getuid", "killpg", "register_at_fork", "sched_getaffinity", "uname"):
    delattr(os, name)
sys.platform = "win32"
"""

USED = """
import sage_inductor
from sage_inductor import Policy, Rule, backend
from sage_inductor.choose import families, tables

backend.InductorWrapper.__call__ = lambda self, gm, inputs: gm.forward  # compiles no C++
q = torch.randn(1, 2, 300, 64)
with sage_inductor.config.patch(emulate=True, policy=Policy([Rule("sage1")])):
    compiled = torch.compile(F.scaled_dot_product_attention, backend="sage")(q, q, q)
    assert torch.equal(compiled, sage_inductor.attention(q, q, q))
print([site.recipe for site in sage_inductor.report()])
sage_inductor.report().to_html("report.html")
Policy([Rule("sage1")]).save("policy.json")
print(Policy.load("policy.json").rules[0].recipe)
of_h200 = tables.built_in()[tables.H200]
for _ in range(2):  # anew, and in the place of what is there
    tables.save(of_h200)
mine = tables._users(tables.H200, families.flash_attention())
print(mine.families == of_h200.families)
print(sorted(os.listdir()))
"""


def test_without_what_windows_lacks_calls_are_rewritten_and_files_are_kept(tmp_path, monkeypatch):
    monkeypatch.setenv("SAGE_INDUCTOR_TABLES", str(tmp_path / "tables"))
    result = subprocess.run(
        [sys.executable, "-c", ON_WINDOWS + USED], capture_output=True, text=True, cwd=tmp_path
    )
    assert result.returncode == 0, result.stderr
    assert result.stdout.splitlines() == [
        "['sage1', 'sage1']", "sage1", "True", "['policy.json', 'report.html', 'tables']",
    ]  # fmt: skip
