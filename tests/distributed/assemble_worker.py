"""Assemblies in a world of four: synthetic cuts of known tensors, in one start. What a rank saw goes to a file."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_spec.errors import EngineError
from lightning_spec.parallel.assemble import Assembler, assembled, drain
from lightning_spec.parallel.groups import Ranks
from lightning_spec.parallel.placement import Placement, Span

WIDTH, HEADS, KV, DIM, INNER, VOCAB, LAYERS = 6, 8, 4, 2, 12, 21, 3
Pair = tuple[Placement, Tensor]


def whole_tensors() -> dict[str, Tensor]:
    """A small model under Hugging Face's names, in checkpoint order; every value is known."""
    shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (VOCAB, WIDTH)}
    for layer in range(LAYERS):
        head = f"model.layers.{layer}."
        shapes |= {
            f"{head}input_layernorm.weight": (WIDTH,),
            f"{head}self_attn.q_proj.weight": (HEADS * DIM, WIDTH),
            f"{head}self_attn.k_proj.weight": (KV * DIM, WIDTH),
            f"{head}self_attn.v_proj.weight": (KV * DIM, WIDTH),
            f"{head}self_attn.o_proj.weight": (WIDTH, HEADS * DIM),
            f"{head}mlp.gate.weight": (4, WIDTH),
        }
        for expert in range(4):
            shapes[f"{head}mlp.experts.{expert}.gate_proj.weight"] = (INNER, WIDTH)
            shapes[f"{head}mlp.experts.{expert}.up_proj.weight"] = (INNER, WIDTH)
    shapes |= {"model.norm.weight": (WIDTH,), "lm_head.weight": (VOCAB, WIDTH), "scale": ()}
    values: dict[str, Tensor] = {}
    for number, (name, shape) in enumerate(shapes.items()):
        tensor = torch.arange(torch.Size(shape).numel(), dtype=torch.float32).reshape(shape) + 1000 * number
        values[name] = tensor.to(torch.bfloat16) if "mlp.gate." in name else tensor
    values["map"] = torch.arange(7)
    return values


def held(rank: int, values: dict[str, Tensor]) -> list[Pair]:
    """Rank (2 stages x 2 tensor ranks): fused qkv by kv group, gate and up, rows, columns, copies, padded vocabulary.

    Stage 0 has layers 0 and 2, as with virtual stages. Experts are dealt to the two tensor ranks of a stage.
    """
    stage, half = divmod(rank, 2)
    pairs: list[Pair] = []
    if stage == 0:
        pairs.append(vocabulary("model.embed_tokens.weight", values, half))
    for layer in (0, 2) if stage == 0 else (1,):
        head = f"model.layers.{layer}."
        pairs.append(copied(f"{head}input_layernorm.weight", values))
        pairs += fused_qkv(head, values, half)
        name = f"{head}self_attn.o_proj.weight"
        columns = HEADS * DIM // 2
        part = values[name][:, half * columns : (half + 1) * columns].clone()
        pairs.append((Placement(name, tuple(values[name].shape), (Span(0, WIDTH, 0),), half * columns), part))
        pairs.append(copied(f"{head}mlp.gate.weight", values))
        for expert in (2 * half, 2 * half + 1):
            gate, up = (f"{head}mlp.experts.{expert}.{kind}_proj.weight" for kind in ("gate", "up"))
            both = torch.cat([values[gate], values[up]])
            pairs.append((Placement(gate, (INNER, WIDTH), (Span(0, INNER, 0),)), both))
            pairs.append((Placement(up, (INNER, WIDTH), (Span(INNER, INNER, 0),)), both))
    if stage == 1:
        pairs.append(copied("model.norm.weight", values))
        pairs.append(vocabulary("lm_head.weight", values, half))
        pairs += [copied("scale", values), copied("map", values)]
    return pairs


def copied(name: str, values: dict[str, Tensor]) -> Pair:
    return Placement.whole(name, tuple(values[name].shape)), values[name].clone()


def vocabulary(name: str, values: dict[str, Tensor], half: int) -> Pair:
    """22 padded rows over two ranks; the last one stands for no token."""
    padded = torch.cat([values[name], torch.full((1, WIDTH), -1.0)])
    rows = padded[half * 11 : (half + 1) * 11].clone()
    return Placement(name, (VOCAB, WIDTH), (Span(0, 11 - half, half * 11),)), rows


def fused_qkv(head: str, values: dict[str, Tensor], half: int) -> list[Pair]:
    group, mine = HEADS // KV, KV // 2
    q, k, v = (values[f"{head}self_attn.{kind}_proj.weight"] for kind in "qkv")
    rows = []
    spans: dict[str, list[Span]] = {"q": [], "k": [], "v": []}
    at = 0
    for kv in range(half * mine, (half + 1) * mine):
        for kind, tensor, count in (("q", q, group * DIM), ("k", k, DIM), ("v", v, DIM)):
            rows.append(tensor[kv * count : (kv + 1) * count])
            spans[kind].append(Span(at, count, kv * count))
            at += count
    fused = torch.cat(rows)
    return [
        (Placement(f"{head}self_attn.{kind}_proj.weight", tuple(tensor.shape), tuple(spans[kind])), fused)
        for kind, tensor in (("q", q), ("k", k), ("v", v))
    ]


class Counted(Ranks):
    """Counts the exchanges of objects."""

    gathers = 0

    def gather(self, value: Any) -> list[Any]:
        self.gathers += 1
        return super().gather(value)


def got(stream: Iterator[tuple[str, Tensor]]) -> list[tuple[str, Tensor]]:
    return [(name, tensor.clone()) for name, tensor in stream]


def failure(action: Callable[[], Any]) -> str:
    try:
        action()
    except (ValueError, EngineError) as error:
        return str(error)
    return ""


def cases(rank: int, ranks: Counted) -> dict[str, Any]:
    values = whole_tensors()
    mine = held(rank, values)
    out: dict[str, Any] = {}
    for limit in (1, 700, 1 << 20):
        out[f"first-{limit}"] = got(assembled(mine, ranks, bucket_bytes=limit))
    out["several"] = got(assembled(mine, ranks, targets=(1, 2), bucket_bytes=300))

    before = ranks.gathers
    assembler = Assembler(mine, ranks, targets=(3,), bucket_bytes=500)
    out["order"], out["sizes"] = list(assembler.tensors), assembler.sizes
    out["again"] = []
    for _ in range(3):
        for _, tensor in {id(tensor): pair for pair in mine for tensor in pair[1:]}.values():
            tensor += 1
        out["again"].append(got(assembler.run(mine)))
    out["gathers"] = ranks.gathers - before

    # A consumer that fails: before it looked, after three tensors, and one that is done after all but one.
    mine = held(rank, values)
    for taken in (0, 3, len(values) - 1):
        stream = assembled(mine, ranks, bucket_bytes=400)
        if rank == 0:
            for _ in range(taken):
                next(stream)
        drain(stream)
    out["after"] = got(assembled(mine, ranks))

    copies = [copied(name, values) for name in values] if rank >= 2 else []
    out["copies"] = got(assembled(copies, ranks, targets=(0, 3)))
    out["nothing"] = got(assembled([], ranks))
    out["hole"] = failure(lambda: assembled([] if rank == 1 else mine, ranks))
    other = [(p, t.double() if rank == 3 and p.name == "model.norm.weight" else t) for p, t in mine]
    out["dtype"] = failure(lambda: assembled(other, ranks))
    out["changed"] = failure(lambda: next(assembler.run(mine[1:]), None))
    return out


def main() -> None:
    folder = Path(sys.argv[1])
    torch.set_num_threads(1)
    dist.init_process_group("gloo", rank=int(os.environ["LOCAL_RANK"]))
    rank = dist.get_rank()
    group = dist.group.WORLD
    assert group is not None
    torch.save(cases(rank, Counted(group, group)), folder / f"assemble-{rank}.pt")
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
