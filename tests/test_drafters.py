"""Every drafter by its name: it decodes losslessly, one target forward a round, and a wrong name says what is wrong."""

from __future__ import annotations

import json

import pytest
import torch
from decoding_helpers import decode, drafter_of, random_prompts, requests_of, tokens_of
from eagle_helpers import tiny_config, tiny_head

from spectune.decoding.decoder import Decoder, DecodeSettings
from spectune.decoding.drafters import build_drafter
from spectune.decoding.schedule import KSchedule
from spectune.decoding.stopping import StopRule
from spectune.engines.turns import take_turns
from spectune.errors import UsageError
from spectune.heads.blockwise import BlockwiseConfig, BlockwiseHeads
from spectune.heads.eagle_layouts import save_eagle
from spectune.heads.exit import ExitConfig, ExitHead
from spectune.heads.medusa import MedusaConfig, MedusaHeads
from spectune.heads.medusa_layouts import save_blockwise, save_exit, save_medusa, save_mlp
from spectune.heads.mlp import MlpConfig, MlpSpeculator
from spectune.sweeping.cell import Sampling

SAMPLING = Sampling(temperature=1.2, top_p=0.95)
TOKENS = 12  # of every output: two rounds of 5 + 1 at least
NAMES = [
    "ngram",
    "tree:ngram",
    "{other}",
    "tree:{other}",
    "sequoia:{other}",
    "specinfer:{other}",
    "early-exit:1",
    "tree:early-exit:1",
    "layer-skip:1",
    "layer-skip:a0,m1",
    "layer-skip:{heads}/skip",
    "early-exit:{heads}/exit",
    "tree:early-exit:{heads}/exit",
    "medusa:{heads}/medusa",
    "tree:medusa:{heads}/medusa",
    "blockwise:{heads}/blockwise",
    "tree:blockwise:{heads}/blockwise",
    "eagle:{heads}/eagle",
    "eagle2:{heads}/eagle",
    "eagle3:{heads}/eagle3",
    "tree:eagle3:{heads}/eagle3",
    "mlp-speculator:{heads}/mlp",
    "staged:ngram>{other}",
    "staged:{other}>early-exit:1",
    "staged:ngram>eagle3:{heads}/eagle3",
]
# Their rounds are those of the drafters whose weights they round.
INT8_NAMES = [
    "int8:{other}",
    "int8:target",
    "int8:early-exit:{heads}/exit",
    "int8:medusa:{heads}/medusa",
    "int8:mlp-speculator:{heads}/mlp",
    "tree:int8:eagle3:{heads}/eagle3",
    "staged:ngram>int8:{other}",
]


@pytest.fixture(scope="module", autouse=True)
def cache(tmp_path_factory):
    """Planned trees are measured into a cache of the test's own."""
    patch = pytest.MonkeyPatch()
    patch.setenv("SPECTUNE_CACHE", str(tmp_path_factory.mktemp("cache")))
    yield
    patch.undo()


@pytest.fixture(scope="module")
def heads(tiny, tmp_path_factory):
    """Random heads in their files."""
    folder = tmp_path_factory.mktemp("heads")
    torch.manual_seed(5)
    embedding, rows = tiny.model.embedding, tiny.model.head_rows()
    for version, name in ((1, "eagle"), (3, "eagle3")):
        save_eagle(folder / name, tiny_head(tiny_config(version)))
    medusa = MedusaHeads(MedusaConfig(64, 128, heads=3))
    blockwise = BlockwiseHeads(BlockwiseConfig(64, 128, inner_size=48, heads=3))
    exit_head = ExitHead(ExitConfig(1, 64, 128))
    for head in (medusa, blockwise, exit_head):
        head.bind(embedding, rows)
        with torch.no_grad():
            for parameter in head.parameters():
                parameter.add_(0.1 * torch.randn_like(parameter))
    save_medusa(folder / "medusa", medusa)
    save_blockwise(folder / "blockwise", blockwise)
    save_exit(folder / "exit", exit_head)
    save_mlp(folder / "mlp", MlpSpeculator(MlpConfig(64, 32, 128, steps=3)))
    (folder / "skip").mkdir()
    (folder / "skip" / "config.json").write_text(json.dumps({"spectune_head": "layer-skip", "skip": ["m1"]}))
    return folder


@pytest.fixture
def named(tiny, heads, other_folder):
    return lambda name: drafter_of(tiny, name.format(heads=heads, other=other_folder))


@pytest.fixture(scope="module")
def plain(tiny):
    """Greedy and seeded sampled text without speculation."""
    prompts = random_prompts(4)
    greedy = decode(tiny, None, prompts, max_new_tokens=TOKENS, stop=StopRule())
    sampled = decode(tiny, None, prompts, max_new_tokens=TOKENS, stop=StopRule(), sampling=SAMPLING, rule="match")
    return prompts, tokens_of(greedy), tokens_of(sampled)


@pytest.mark.parametrize("batch", [1, 3])
@pytest.mark.parametrize("name", NAMES + INT8_NAMES)
def test_every_drafter_writes_what_plain_decoding_writes(tiny, named, plain, name, batch):
    prompts, greedy, sampled = plain
    drafter = named(name)
    for rule, sampling, expected in (("greedy", Sampling(), greedy), ("match", SAMPLING, sampled)):
        run = decode(
            tiny,
            drafter,
            prompts,
            k=5,
            batch=batch,
            max_new_tokens=TOKENS,
            stop=StopRule(),
            sampling=sampling,
            rule=rule,
        )
        assert tokens_of(run) == expected


@pytest.fixture
def target_calls(tiny, monkeypatch):
    """Shapes of the target's forwards, counted at the model itself. Drafters on its layers run a model of their own."""
    calls = []
    for method in ("forward", "forward_with_states"):
        original = getattr(type(tiny.model), method)

        def count(self, *arguments, original=original, **options):
            if self is tiny.model:
                calls.append(arguments[0].shape)
            return original(self, *arguments, **options)

        monkeypatch.setattr(type(tiny.model), method, count)
    return calls


@pytest.mark.parametrize("name", NAMES + INT8_NAMES)
def test_every_round_takes_one_target_forward(tiny, named, name, target_calls):
    drafter = named(name)
    # Plans its trees, if it has any.
    decode(tiny, drafter, random_prompts(3), k=4, batch=2, max_new_tokens=6, stop=StopRule())
    target_calls.clear()
    run = decode(tiny, drafter, random_prompts(3), k=4, batch=2, max_new_tokens=12, stop=StopRule())
    assert len(target_calls) == 3 + len(run.trace)


@pytest.mark.parametrize("name", NAMES)
def test_in_turns_with_plain_decoding_every_prompt_is_prefilled_once(tiny, named, plain, name, target_calls):
    prompts, greedy, sampled = plain
    drafter = named(name)
    for batch, drafters in ((1, (None, drafter)), (3, (drafter, None))):
        for rule, sampling, expected in (("greedy", Sampling(), greedy), ("match", SAMPLING, sampled)):
            # Plans its trees, if it has any.
            decode(tiny, drafter, prompts, k=5, batch=batch, max_new_tokens=6, sampling=sampling, rule=rule)
            settings = DecodeSettings(KSchedule.constant(5), rule, sampling)
            decoders = [Decoder(tiny.model, d, settings, StopRule()) for d in drafters]
            target_calls.clear()
            runs = take_turns(decoders, requests_of(prompts, TOKENS), batch)
            assert [tokens_of(run) for run in runs] == [expected, expected]
            assert len(target_calls) == len(prompts) + sum(len(run.trace) for run in runs)


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("medusa", "medusa needs a head"),
        ("eagle3:./nowhere", "no folder ./nowhere"),
        ("eagle3:{heads}/medusa", "holds a medusa head"),
        ("medusa:{heads}/eagle", "holds a eagle head"),
        ("tree:", "names no drafter"),
        ("tree:staged:ngram>x", "cannot draft inside tree"),
        ("sequoia:ngram", "plans trees for language models"),
        ("tree:mlp-speculator:{heads}/mlp", "chains only"),
        ("staged:ngram", "two stages"),
        ("egle3:x", "did you mean eagle3"),
        ("early-exit:9", "exit after 1 to 1"),
        ("layer-skip:", "names no layers"),
        ("int8:", "names no drafter"),
        ("int8:ngram", "ngram has no weights"),
        ("int8:int8:target", "names no drafter"),
        ("int8:tree:eagle3:demo", "write tree:int8:eagle3:demo"),
        ("int8:eagle2:demo", "write tree:int8:eagle:demo"),
        ("int8:staged:ngram>x", "write staged:ngram>int8:NAME"),
        ("int8:tree:ngram", "write tree:int8:NAME"),
        ("int8:tree:{heads}/eagle2", "write tree:int8:/.*/eagle2"),
        ("tree:int8:ngram", "ngram cannot draft inside tree"),
        ("tree:int8:", "int8 cannot draft inside tree"),
        ("int8:egle3:x", "did you mean eagle3"),
    ],
)
def test_a_wrong_name_says_what_is_wrong(tiny, heads, name, words):
    with pytest.raises(UsageError, match=words):
        build_drafter(name.format(heads=heads), tiny, device=torch.device("cpu"), dtype=torch.float32)


def test_a_head_for_another_target_is_refused(tiny, tmp_path):
    heads = MedusaHeads(MedusaConfig(32, 128, heads=2))
    heads.bind(torch.zeros(128, 32), torch.zeros(128, 32))
    save_medusa(tmp_path, heads)
    with pytest.raises(UsageError, match="width 32"):
        drafter_of(tiny, f"medusa:{tmp_path}")


def test_a_head_states_what_one_step_reads(tiny, heads):
    built = build_drafter(f"eagle3:{heads}/eagle3", tiny, device=torch.device("cpu"), dtype=torch.float32)
    assert built.info is not None
    own = sum(p.numel() for p in tiny_head(tiny_config(3)).parameters())
    assert built.info.weight_bytes_per_step == 4 * own
    assert built.info.kv_bytes_per_token == 2 * 2 * 16 * 4
