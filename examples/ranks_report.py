"""Shared reporting of the examples: gathering values of all ranks, and tables."""

import torch.distributed as dist


def gather(value: object) -> list:
    values = [None] * dist.get_world_size()
    dist.all_gather_object(values, value)
    return values


def print_table(title: str, rows: list[tuple[str, str]]) -> None:
    width = max(len(name) for name, _ in rows)
    print(f"\n{title}")
    for name, value in rows:
        print(f"  {name:<{width}}  {value}")


def print_columns(rows: list[tuple[str, ...]]) -> None:
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for row in rows:
        print("  ".join(cell.rjust(width) for cell, width in zip(row, widths, strict=True)))


def smooth(values: list[float], window: int = 10) -> list[float]:
    return [
        sum(part) / len(part)
        for i in range(len(values))
        if (part := values[max(0, i - window + 1) : i + 1])
    ]
