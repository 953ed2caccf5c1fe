"""AutoQuantize against uniform recipes and random choices: ``python benchmarks/auto_quantize.py``.

Searches formats for a checkpoint, by default the one that ships with the package, and prints the
divergence from the original's predictions (nats a token, over held-out text) of the choice, of
every preset of at most as many bits a weight, and of random choices of the same size. The choice
and the presets are exported, by their algorithms, and read back. Random choices are applied to the
model in memory, by scales of the largest magnitudes, and so is the choice that they are compared
with. ``nox -s real`` compares the presets that search with the others in its table.
"""

from __future__ import annotations

import argparse
import random
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import modelopt_lite
from modelopt_lite import quantize_and_export
from modelopt_lite.auto.kl import divergence
from modelopt_lite.auto.rounded import Part, input_scales, layer_parts
from modelopt_lite.auto.search import Search
from modelopt_lite.auto.settle import prepare_search
from modelopt_lite.build import eager_experts
from modelopt_lite.calibrate.data import load_tokenizer, text_blocks
from modelopt_lite.calibrate.observe import InputStats, InputWatch, Site
from modelopt_lite.calibrate.rounding import InputRounding
from modelopt_lite.calibrate.text import evaluation_text
from modelopt_lite.checkpoint.dequant import DequantizedSource, open_source
from modelopt_lite.errors import ModelOptLiteError
from modelopt_lite.recipes import Recipe, load_recipe, preset_names
from modelopt_lite.request import Options, make_request

RECIPE = "auto_weight_only"
TINY = Path(modelopt_lite.__file__).parent / "data" / "tiny_qwen3_moe"


class Whole:
    """The model in memory, what entered its matrices, and its predictions of held-out text."""

    def __init__(self, search: Search, tokens: int, seq_len: int) -> None:
        job = search.job
        self.search, self.model, self.names = search, job.model, job.plan.names
        tokenizer = load_tokenizer(job.folder, False)
        self.blocks = text_blocks(tokenizer, evaluation_text(), seq_len, -(-tokens // seq_len))
        store, seen = job.store(), InputStats()
        loaded = {unit.name: store.load(unit) for unit in job.plan.units}
        for unit in loaded.values():
            store.attach(unit)
        watched = {m.entry for plan in search.space.plans.values() for m in plan.matrices}
        watch = InputWatch(seen.visit)
        watch.watch({n: p for n, p in self.model.named_parameters() if n in watched})
        with watch:
            for batch in search.batches:
                self.model(input_ids=batch, use_cache=False)
        self.exact = self._predictions()
        self.parts: list[tuple[Site, Part]] = []
        for unit in loaded.values():
            if unit.unit.is_layer:
                scales = input_scales(search.space, unit.unit.name, seen.amax)
                found = layer_parts(search.space, unit, scales, self._buffer)
                self.parts += [(site, part) for site, parts in found.items() for part in parts]
        self._originals = [part.target.clone() for _, part in self.parts]

    def _buffer(self, entry: str) -> Tensor:
        parameter: Tensor = self.model.get_parameter(entry)
        return parameter

    def _predictions(self) -> list[Tensor]:
        blocks = (block[None] for block in self.blocks)
        return [self.model(input_ids=block, use_cache=False).logits for block in blocks]

    def divergence(self) -> float:
        """Return that of the model as it is now, in nats a token."""
        made = (
            divergence(exact, self.model(input_ids=block[None], use_cache=False).logits)
            for block, exact in zip(self.blocks, self.exact, strict=True)
        )
        return sum(made) / sum(map(len, self.blocks))

    def of_choice(self, formats: Mapping[str, str]) -> float:
        """Return the divergence of a choice, group -> format."""
        chosen: dict[Site, Part] = {}
        for site, part in self.parts:
            rounded = part.rounded.get(formats[part.group])
            if rounded is not None:
                chosen[site] = part
                codec = rounded.format.codec
                part.target.copy_(codec.dequantize(rounded.tensors, part.target.dtype))

        def visit(site: Site, x: Tensor, batched: bool) -> Tensor | None:
            if batched:
                rows = [visit(Site(site.entry, e), own, False) for e, own in enumerate(x)]
                return torch.stack([o if r is None else r for r, o in zip(rows, x, strict=True)])
            part = chosen.get(site)
            if part is None or not x.numel():
                return None
            rounded = part.rounded[formats[part.group]]
            return rounded.format.fake_quantize_input(x, rounded.input_scale)

        watch = InputWatch(visit)
        watch.watch({entry: self._buffer(entry) for entry in {site.entry for site in chosen}})
        with self._restored(), watch:
            return self.divergence()

    def of_export(self, folder: Path) -> float:
        """Return the divergence of an export."""
        source = open_source(folder)
        assert isinstance(source, DequantizedSource)
        rounding = InputRounding(source, self.names, torch.device("cpu"))
        for plan in list(self.search.space.plans.values())[:1]:
            for m in plan.matrices:
                place = self.names.place(m.source)
                assert place is not None
                entry, region = place
                target = self._buffer(entry)
                for part in (region, m.region):
                    target = target[part] if part else target
                value = source.read(m.source if m.stacked else f"{m.name}.weight")
                target.copy_(value.mT if m.input_major and value.ndim == 2 else value)
        watch = InputWatch(rounding.visit, getattr(rounding, "amend", None))
        watch.watch({entry: self._buffer(entry) for entry in rounding.entries})
        with self._restored(), watch:
            return self.divergence()

    @contextmanager
    def _restored(self) -> Iterator[None]:
        try:
            yield
        finally:
            for (_, part), value in zip(self.parts, self._originals, strict=True):
                part.target.copy_(value)


def random_choice(search: Search, generator: random.Random) -> dict[str, str]:
    """Return a random choice that leaves no room for a larger format anywhere."""
    sizes = {group.name: dict(group.bytes) for group in search.space.groups}
    formats = {name: min(own, key=own.__getitem__) for name, own in sizes.items()}
    left = search.limit - sum(sizes[name][fmt] for name, fmt in formats.items())
    upgrades = [(name, fmt) for name, own in sizes.items() for fmt in own]
    generator.shuffle(upgrades)
    for name, fmt in upgrades:
        more = sizes[name][fmt] - sizes[name][formats[name]]
        if 0 < more <= left:
            formats[name] = fmt
            left -= more
    return formats


def uniform_presets(search: Search, options: Mapping[str, Any]) -> Iterator[tuple[str, float]]:
    """Yield the presets of at most the target's bits, and the bits."""
    space, held = search.space, search.space.group_of()
    whole = search.job.model.dtype.itemsize
    for name in preset_names():
        if load_recipe(name).auto_quantize is not None:
            continue
        try:
            request = make_request(search.job.folder, Options(recipe=name, **options))
        except ModelOptLiteError:
            continue  # its shapes or its algorithm do not suit the model
        matrices = [m for m in request.job.plan.matrices if m.name in held]
        values = sum(torch.Size(m.shape).numel() for m in matrices)
        parts = [part for m in matrices for part in m.parts]
        size = sum(torch.Size(part.shape).numel() * part.dtype.itemsize for part in parts)
        bits = 8 * (size + whole * (space.weights - values)) / space.weights
        if bits <= search.auto.effective_bits and not request.job.plan.keeps_scales:
            yield name, bits


def main() -> None:
    """Search, compare, and print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--source", type=Path, default=TINY, help="a checkpoint with a tokenizer")
    parser.add_argument("--recipe", default=RECIPE, help="one with auto_quantize")
    parser.add_argument("--formats", nargs="+", help="default: the recipe's, as the next two")
    parser.add_argument("--method")
    parser.add_argument("--bits", type=float)
    parser.add_argument("--tokens", type=int, default=8192, help="of held-out text")
    parser.add_argument("--seq-len", type=int, default=512)
    parser.add_argument("--calib-size", type=int, default=64)
    parser.add_argument("--random", type=int, default=20, help="how many random choices")
    parser.add_argument("--presets", nargs="*", help="default: all of at most as many bits")
    parser.add_argument("--in-memory", action="store_true", help="only random choices")
    args = parser.parse_args()
    recipe = load_recipe(args.recipe)
    if recipe.auto_quantize is None:
        parser.error(f"the recipe {args.recipe!r} leaves no formats to a search")
    said = {"formats": args.formats, "method": args.method, "effective_bits": args.bits}
    auto = replace(recipe.auto_quantize, **{key: v for key, v in said.items() if v is not None})
    recipe = replace(recipe, auto_quantize=replace(auto, formats=tuple(auto.formats)))
    data: dict[str, Any] = {"calib_size": args.calib_size, "calib_seq_len": args.seq_len}
    with tempfile.TemporaryDirectory() as folder, torch.no_grad():
        options = Options(search_dir=folder, progress=False, **data)
        search = prepare_search(args.source, options, recipe)
        search.load_data()
        scores = search.run()
        chosen, said_of_it = search.chosen(scores)
        print(said_of_it, flush=True)
        with eager_experts(search.job.model), search.job.products():
            whole = Whole(search, args.tokens, args.seq_len)
            print(f"{sum(map(len, whole.blocks)):,} tokens of held-out text; nats a token")
            if not args.in_memory:
                compare_exports(search, whole, chosen, args.presets, Path(folder))
            compare_random(search, whole, search.formats(scores), args.random)


def compare_exports(
    search: Search, whole: Whole, chosen: Recipe, presets: Sequence[str] | None, folder: Path
) -> None:
    """Print the divergence of what the choice and uniform presets export."""
    data = data_of(search)
    found = [(n, b) for n, b in uniform_presets(search, data) if presets is None or n in presets]
    rows: list[tuple[str, Recipe, float | None]] = [("the choice", chosen, None)]
    rows += [(name, load_recipe(name), bits) for name, bits in found]
    made = []
    for name, recipe, bits in rows:
        export = folder / name.replace(" ", "_")
        quantize_and_export(
            search.job.folder, recipe=recipe, export_dir=export, progress=False, **data
        )
        made.append(whole.of_export(export))
        size = "" if bits is None else f" | {bits:.3f} bits"
        print(f"{name}{size} | {made[-1]:.6f}", flush=True)
    beaten = sum(own > made[0] for own in made[1:])
    print(f"the choice has the lower divergence than {beaten} of {len(found)} presets", flush=True)


def compare_random(search: Search, whole: Whole, formats: Mapping[str, str], count: int) -> None:
    """Print the divergence of the choice and of random ones, by scales of largest magnitudes."""
    best = whole.of_choice(formats)
    bits = search.space.bits(formats)
    print(f"the choice in memory | {bits:.3f} bits | {best:.6f}", flush=True)
    generator, beaten = random.Random(0), 0
    for index in range(count):
        drawn = random_choice(search, generator)
        own = whole.of_choice(drawn)
        beaten += own > best
        bits = search.space.bits(drawn)
        print(f"random {index} | {bits:.3f} bits | {own:.6f}", flush=True)
    print(f"the choice has the lower divergence than {beaten} of {count} random choices")


def data_of(search: Search) -> dict[str, Any]:
    """Return the options of calibration that the search was given."""
    options = search.options
    return {"calib_size": options.calib_size, "calib_seq_len": options.calib_seq_len}


if __name__ == "__main__":
    main()
