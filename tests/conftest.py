"""Before torch is loaded: one thread, for small models on a machine that may be busy."""
import os

import pytest

os.environ.setdefault("OMP_NUM_THREADS", "1")


@pytest.fixture(scope="session")
def short_run(tmp_path_factory):
    """A finished short run of the default command, from nothing: its init, warm-up, final."""
    from test_train import SHORT, command

    import train

    out = tmp_path_factory.mktemp("run") / "a"
    with pytest.MonkeyPatch.context() as patch:
        assert command(train, patch, *SHORT, "--out", out) is None
    return out
