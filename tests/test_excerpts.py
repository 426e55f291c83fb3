"""What a cell wrote, kept for people to read: small, with the origin of each token, and outside the key."""

from __future__ import annotations

import json

import pytest
from conftest import save_tiny
from synthetic_run import cell
from test_decoder_greedy import with_tokenizer
from test_native_engine import spec_of, suite_of

from spectune.engines.native import NativeEngine
from spectune.suites.prompt import Prompt, Suite
from spectune.sweeping.cell import EXCERPT_PROMPT, EXCERPT_TOKENS, CellResult, Excerpt, ExcerptPiece


@pytest.fixture(scope="module")
def engine(tmp_path_factory):
    folder = with_tokenizer(save_tiny(tmp_path_factory.mktemp("excerpts"), max_positions=1024), 128)
    return NativeEngine(str(folder), dtype="float32", device="cpu")


def decoded(engine, suite, **changes):
    spec = spec_of(engine, ignore_eos=True, **changes)
    requests = engine.render(spec, suite).requests
    engine.warm_up(spec, requests)
    for order, mode in enumerate(("plain", "speculative")):
        done = engine.run_pass(spec, requests, mode=mode, repeat=0, order=order)
    return engine.excerpt(requests), done.requests[0]


def test_an_excerpt_is_the_first_request_with_the_counts_of_its_rounds(engine):
    found, result = decoded(engine, suite_of("a", "b"), batch=2, max_new_tokens=24)
    assert found.id == "a"
    assert not found.cut
    assert sum(p.tokens for p in found.pieces) == result.output_tokens == 24
    kept = sum(p.tokens for p in found.pieces if p.kind == "draft")
    assert kept == sum(c.accepted * c.count for c in result.rounds)
    assert found.pieces[0].kind == "prefill"
    assert found.pieces[0].tokens == 1


def test_an_excerpt_is_small_however_long_prompt_and_output_are(engine):
    suite = Suite("s", "test", (Prompt("long", "all", text="w5 w6 " * 300),))
    found, _ = decoded(engine, suite, batch=1, max_new_tokens=100)
    assert sum(p.tokens for p in found.pieces) == EXCERPT_TOKENS
    assert len(found.prompt) == EXCERPT_PROMPT
    assert found.cut
    assert found.prompt_cut


def test_a_file_without_an_excerpt_is_as_it_was_and_an_excerpt_does_not_change_the_key():
    plain = cell()
    assert "excerpt" not in json.loads(plain.model_dump_json())
    assert CellResult.model_validate_json(plain.model_dump_json()) == plain
    piece = ExcerptPiece(text="x", kind="draft", tokens=2)
    own = plain.model_copy(
        update={"excerpt": Excerpt(id="p", prompt="q", prompt_cut=False, pieces=(piece,), cut=False)}
    )
    assert own.spec.key == plain.key
    assert CellResult.model_validate_json(own.model_dump_json()).excerpt == own.excerpt
