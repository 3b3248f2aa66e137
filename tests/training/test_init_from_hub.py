"""Weights of the Hugging Face hub (`init_from=hf:NAME`): from its cache, from a small hub on this machine, and without
a network."""

import http.server
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from tests.conftest import Train
from tests.data.test_prepare_hub import FakeHub
from tests.training.gpt2_weights import (
    TOKENS,
    logits_of,
    pickled_layout,
    random_gpt2,
    sharded_layout,
    write_transformers,
)
from tests.training.test_init_from import GPT2, INPUT, started_logits
from tests.training.test_init_from_refused import refusal
from training.weights import read_weights


class ModelHub(FakeHub):
    """FakeHub for models, whose files have addresses without a kind before the name."""

    def serve(self) -> None:
        if not self.path.startswith("/api/"):
            self.path = f"/models{self.path}"
        super().serve()

    do_GET = do_HEAD = serve


HUB_FILE = "/{repo_id}/resolve/{revision}/{filename}"  # where the hub has a model's file


@pytest.fixture
def hub_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """An empty cache, and a hub that cannot be reached."""
    from huggingface_hub import close_session, constants

    close_session()  # it keeps the proxies of its first use
    for name in ("HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY"):
        monkeypatch.delenv(name, raising=False)
        monkeypatch.delenv(name.lower(), raising=False)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(constants, "ENDPOINT", "http://127.0.0.1:9")
    monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", "http://127.0.0.1:9" + HUB_FILE)
    yield tmp_path / "cache"
    close_session()


def test_a_model_in_the_hubs_cache_needs_no_network(run_train: Train, hub_cache: Path) -> None:
    state = random_gpt2()
    repository, commit = hub_cache / "models--openai-community--gpt2", "c" * 40
    write_transformers(repository / "snapshots" / commit, state)
    (repository / "refs").mkdir()
    (repository / "refs/main").write_text(commit)
    logits = started_logits(run_train, "hf:openai-community/gpt2", *GPT2)
    torch.testing.assert_close(logits[..., :TOKENS], logits_of(state, INPUT), rtol=1e-5, atol=1e-5)


def test_a_model_is_downloaded_once(hub_cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from huggingface_hub import constants

    safe, pickled = random_gpt2(), random_gpt2(seed=1)
    sharded_layout(tmp_path / "safe", safe)
    pickled_layout(tmp_path / "pickled", pickled)
    ModelHub.repositories = {("o/safe", "main"): tmp_path / "safe", ("o/pickled", "v2"): tmp_path / "pickled"}
    ModelHub.log = []
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), ModelHub) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        with monkeypatch.context() as patch:
            address = f"http://127.0.0.1:{server.server_port}"
            patch.setattr(constants, "ENDPOINT", address)
            patch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", address + HUB_FILE)
            assert torch.equal(read_weights("hf:o/safe").state["transformer.wpe.weight"], safe["wpe.weight"])
            assert torch.equal(read_weights("hf:o/pickled@v2").state["transformer.wpe.weight"], pickled["wpe.weight"])
            assert "RevisionNotFoundError" in refusal("hf:o/pickled")
            requests = len(ModelHub.log)
        server.shutdown()
    for name in ("o/safe", "o/pickled@v2"):  # without the hub
        assert len(read_weights(f"hf:{name}").state) == len(safe)
    assert len(ModelHub.log) == requests


def test_a_hub_that_cannot_be_reached(hub_cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    line = refusal("hf:gpt2")
    assert f"init_from=hf:gpt2 is no folder here ({tmp_path / 'gpt2'}), and cannot be had from the hub" in line
    assert "hf download gpt2" in line
    assert "no name on the hub" in refusal("hf:../my models")
