"""Stop strings end an output wherever they fall: inside a token, over tokens, over the border of a round."""

from __future__ import annotations

import pytest
from decoding_helpers import decode, drafter_of, random_prompts

from spectune.decoding.stopping import StopRule


def spell(tokens) -> str:
    """Two letters per token, so that a string may begin in the middle of one."""
    return "".join(chr(97 + t % 26) + chr(97 + t // 26) for t in tokens)


@pytest.mark.parametrize("k", [1, 4, 7])
@pytest.mark.parametrize("width", [1, 2, 3, 5])
def test_a_stop_string_cuts_the_same_tokens_for_every_place_and_k(tiny, tiny_folder, k, width):
    prompt = random_prompts(1)[0]
    plain = decode(tiny, None, [prompt], k=0, max_new_tokens=24, stop=StopRule()).generations[0].tokens
    text = spell(plain)
    for start in range(0, len(text) - width, 3):
        string = text[start : start + width]
        end = text.index(string) + width  # it may occur earlier
        expected = plain[: (end + 1) // 2]
        stop = StopRule(frozenset(), (string,), spell)
        generation = decode(
            tiny, drafter_of(tiny, tiny_folder), [prompt], k=k, max_new_tokens=24, stop=stop
        ).generations[0]
        assert generation.tokens == expected
        assert generation.finish_reason == "stop"
        assert generation.stop_string == string
        # What was drafted behind the stop was never offered.
        assert all(r.accepted == r.drafted for r in generation.rounds)


def test_a_stop_string_of_one_request_leaves_its_batch_mates_alone(tiny, tiny_folder):
    prompts = random_prompts(3)
    plain = [decode(tiny, None, [p], k=0, stop=StopRule()).generations[0].tokens for p in prompts]
    texts = [spell(tokens) for tokens in plain]
    string = next(texts[0][i : i + 4] for i in range(6, 40) if not any(texts[0][i : i + 4] in t for t in texts[1:]))
    stop = StopRule(frozenset(), (string,), spell)
    run = decode(tiny, drafter_of(tiny, tiny_folder), prompts, k=4, batch=3, stop=stop)
    assert [g.finish_reason for g in run.generations] == ["stop", "length", "length"]
    assert [g.tokens for g in run.generations[1:]] == plain[1:]


def test_the_first_of_several_stop_strings_wins():
    rule = StopRule(frozenset(), ("ca", "ba"), spell)
    assert rule.find([], [0, 1, 2]) == 1  # "aa" "ba" "ca"
    assert rule.reason([0, 1], 2) == "ba"
    assert rule.reason([0], 1) is None
    assert rule.find([], [5, 6]) is None
