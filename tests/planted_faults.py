"""Faults planted in the product, one at a time, each of which a test must catch.

``python -m tests.planted_faults [--only WORDS]`` copies the package and the tests to a temporary
folder, plants a fault, runs the tests named beside it, and prints the first that fails. It exits
with 1 if a fault is not caught, or its text is no longer in the product. It takes about
an hour.
"""

import argparse
import os
import re
import shutil
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
LIMIT_SECONDS = 300  # a fault may make ranks wait for each other


@dataclass(frozen=True)
class Fault:
    """A text of the product, what replaces it, and the tests that must fail then."""

    name: str
    path: str
    text: str
    replacement: str
    tests: str


FAULTS = [
    # Compression
    Fault(
        "error feedback keeps the residual with the wrong sign",
        "pyparallel/compression/residual.py",
        "lost = total - decoded",
        "lost = decoded - total",
        "tests/compression/wrappers",
    ),
    Fault(
        "error feedback drops the residual",
        "pyparallel/compression/residual.py",
        "return x.float() if residual is None else residual + x",
        "return x.float()",
        "tests/compression/wrappers",
    ),
    Fault(
        "DGC keeps momentum where an entry was sent",
        "pyparallel/compression/sparsifiers/dgc.py",
        "u.index_fill_(0, indices.long(), 0)",
        "u.index_fill_(0, indices.long()[:0], 0)",
        "tests/compression/sparsifiers",
    ),
    Fault(
        "a threshold sends the entries below it",
        "pyparallel/compression/sparsifiers/threshold.py",
        "large = ~(total.abs() < self.threshold)",
        "large = total.abs() < self.threshold",
        "tests/compression/sparsifiers",
    ),
    Fault(
        "the error of encoding a mean is accumulated once instead of once for each rank",
        "pyparallel/compression/quantizers/blockwise.py",
        "add_or_clear_(residual[mine], lost, times=collectives.size)",
        "add_or_clear_(residual[mine], lost, times=1)",
        "tests/compression/quantizers/test_blockwise.py",
    ),
    Fault(
        "PowerSGD divides a mean by the wrong number of ranks",
        "pyparallel/compression/low_rank/power_sgd.py",
        "right.div_(collectives.size)",
        "right.div_(collectives.size + 1)",
        "tests/compression/low_rank",
    ),
    Fault(
        "a negative number of a draw is decoded",
        "pyparallel/compression/sparsifiers/base.py",
        'if not fits or (numbers.device.type == "cpu" and bool((numbers < 0).any())):',
        "if not fits:",
        "tests/compression/test_contract.py",
    ),
    Fault(
        "a nan that is not sent does not show",
        "pyparallel/compression/sparsifiers/base.py",
        "values.add_((least * 0 + most * 0).to(values.dtype))",
        "pass",
        "tests/compression/test_contract.py",
    ),
    Fault(
        "each rank raises only what it has found corrupt itself in a reduce-scatter",
        "pyparallel/compression/hooks/fsdp_collectives.py",
        "raise_if_any_corrupt(corrupt_sender, collectives)",
        "pass",
        "tests/compression/hooks/test_fsdp_collectives.py",
    ),
    Fault(
        "a reduce-scatter keeps a residual by its place in the buffer",
        "pyparallel/compression/hooks/fsdp_collectives.py",
        "_parts_of(pieces, [index])",
        "_parts_of([Piece(name, (numel,))], [index])",
        "tests/compression/hooks/test_fsdp_collectives.py",
    ),
    Fault(
        "the record of a message outlives a profile",
        "pyparallel/comm/profiling.py",
        "if not profiler._is_profiler_enabled:\n        return function",
        "if True:\n        return function",
        "tests/comm/test_profiling.py",
    ),
    # Replicas of a pipeline
    Fault(
        "a stage steps on weights from before the merge",
        "pyparallel/pipeline/runtime/replicated_predictor.py",
        "            averager.before_step()\n",
        "",
        "tests/pipeline/test_replicas.py",
    ),
    Fault(
        "a stage that skips an update skips its round",
        "pyparallel/pipeline/runtime/replicated_predictor.py",
        "self._take_round(self._inner.skip)",
        "self._inner.skip()",
        "tests/pipeline/test_replicas.py",
    ),
    Fault(
        "replicas begin with weights of their own",
        "pyparallel/pipeline/runtime/replicated_predictor.py",
        "        self._copy_from_first(run)\n",
        "",
        "tests/pipeline/test_replicas.py",
    ),
    Fault(
        "a small batch weighs as much as a large one",
        "pyparallel/pipeline/replicas.py",
        "flat.mul_(weight / total)",
        "flat.mul_(1 / self._run.size)",
        "tests/pipeline/test_replicas.py",
    ),
    # Process groups and calls
    Fault(
        "a group is destroyed while other ranks need it",
        "pyparallel/comm/process_groups.py",
        "if _exists(group) and store_of(None).wait(keys, 0):",
        "if _exists(group):",
        "tests/comm/test_groups.py",
    ),
    Fault(
        "a trainer keeps its groups after close()",
        "pyparallel/comm/run.py",
        "        self._give_back()\n",
        "",
        "tests/comm/test_groups.py",
    ),
    Fault(
        "different calls meet unnoticed",
        "pyparallel/comm/consistency.py",
        "        check_same_call(rows, {call}, process_group)\n",
        "",
        "tests/comm/test_one_sided_calls.py",
    ),
    Fault(
        "training goes on after an interrupt inside an average",
        "pyparallel/comm/run.py",
        "if not isinstance(error, Exception):",
        "if False:",
        "tests/gossip/test_misuse.py",
    ),
    # Gossip
    Fault(
        "what nobody has merged does not come back to the member that sent it",
        "pyparallel/gossip/membership/ledger.py",
        "returned[member] += mass",
        "returned[member] += 0",
        "tests/gossip/membership/test_ledger.py",
    ),
    Fault(
        "an outer step that is taken again sends what error feedback held after the first attempt",
        "pyparallel/gossip/membership/outer_members.py",
        "self._before or self.inner.store",
        "self.inner.store",
        "tests/gossip/membership/test_outer_members.py",
    ),
    Fault(
        "a rank that missed an outer step goes on from its own weights",
        "pyparallel/gossip/membership/outer_members.py",
        "each.is_member and (each.num_taken == most or not are_equal) for",
        "each.is_member for",
        "tests/gossip/membership/test_outer_members.py",
    ),
    Fault(
        "a rank that comes back counts what it had before it was left behind",
        "pyparallel/gossip/membership/averager.py",
        "            self.inner.forget()",
        "            pass",
        "tests/gossip/membership/test_outer_members.py",
    ),
    Fault(
        "members draw the pairs of other outer steps than the furthest one",
        "pyparallel/gossip/membership/outer_members.py",
        "skip_outer_steps(most - num_taken)",
        "skip_outer_steps(0)",
        "tests/gossip/membership/test_outer_members.py",
    ),
    Fault(
        "gradients of keys and values that other ranks have computed are lost on their way",
        "pyparallel/sequence/attention.py",
        "grads += arriving",
        "pass",
        "tests/sequence/test_ring_attention.py",
    ),
    Fault(
        "a rank sees the later chunks of a zig-zag",
        "pyparallel/sequence/ring.py",
        "key_chunk <= query_chunk",
        "key_chunk % self.run.size <= query_chunk",
        "tests/sequence/test_ring_attention.py",
    ),
    Fault(
        "a message is written again before all have read it",
        "pyparallel/gossip/messages/symmetric_memory.py",
        "self._memory.handle.wait_signal(self._unread.pop(0), _READ, self._memory.timeout_ms)",
        "self._unread.pop(0)",
        "tests/gossip/messages/test_symmetric_memory.py",
    ),
    Fault(
        "a sender keeps the mass that it sends",
        "pyparallel/gossip/push_sum/dense_buffer.py",
        "self.weight -= total_mass(masses)",
        "pass",
        "tests/gossip/push_sum",
    ),
    Fault(
        "a failed round loses the mass that was sent",
        "pyparallel/gossip/push_sum/dense_buffer.py",
        "self.weight += total_mass(masses)",
        "pass",
        "tests/gossip/push_sum",
    ),
    Fault(
        "a fused step does not merge the compressed round in flight before its update",
        "pyparallel/gossip/push_sum/buffer.py",
        """        if merges:
            self.merge()
        step(""",
        "        step(",
        "tests/gossip/test_closures.py",
    ),
    Fault(
        "a round is merged without waiting for its messages",
        "pyparallel/gossip/push_sum/buffer.py",
        """        self.wait()
        if self.in_flight:
            with""",
        """        if self.in_flight:
            with""",
        "tests/gossip/push_sum tests/gossip/algorithms/test_sgp.py",
    ),
    Fault(
        "messages go to the neighbors that they should come from",
        "pyparallel/gossip/messages/exchange.py",
        "_transfers(to, headers.sent, sent, [is_difference] * len(to))",
        "_transfers(from_[: len(to)], headers.sent, sent, [is_difference] * len(to))",
        "tests/gossip/push_sum/test_push_sum.py tests/gossip/algorithms/test_sgp.py",
    ),
    Fault(
        "an overlapped round is merged a step late",
        "pyparallel/gossip/push_sum/push_sum.py",
        "if self._steps_in_flight >= self._overlap:",
        "if self._steps_in_flight > self._overlap:",
        "tests/gossip/algorithms/test_sgp.py",
    ),
    Fault(
        "a state is saved without its round",
        "pyparallel/gossip/push_sum/push_sum.py",
        '"round": self.round_index',
        '"round": 0',
        "tests/gossip/test_checkpoint.py tests/gossip/push_sum",
    ),
    Fault(
        "ranks do not check that their arguments are consistent",
        "pyparallel/gossip/trainer.py",
        "check_together(config_fields, error_text",
        "check_together(config_fields[:2], error_text",
        "tests/gossip/test_misuse.py tests/gossip/test_contract.py tests/gossip/test_failures.py",
    ),
    Fault(
        "a compressed message takes the residual's mass along",
        "pyparallel/gossip/push_sum/compressed_buffer.py",
        "self._sent_mass / (self.weight - self._sent_mass)",
        "torch.zeros_like(self.weight)",
        "tests/gossip/push_sum",
    ),
    Fault(
        "SlowMo's momentum has the wrong sign",
        "pyparallel/gossip/algorithms/slowmo.py",
        "x.sub_(u",
        "x.add_(u",
        "tests/gossip/algorithms/test_periodic.py",
    ),
    Fault(
        "compressed pairs always average the same slice of their weights",
        "pyparallel/gossip/messages/averages.py",
        "turn, turns = index // self._interleaved % self._turns, self._turns",
        "turn, turns = 0, self._turns",
        "tests/gossip/algorithms/test_noloco.py",
    ),
    Fault(
        "outer steps are recommended as if nothing travelled beside the training",
        "pyparallel/planning/simulate/algorithms.py",
        "self._sent[number][0] >= self._options.delay",
        "self._sent[number][0] >= 0",
        "tests/planning/recommend/test_model.py",
    ),
    Fault(
        "an outer step with a delay loses what a rank learned meanwhile",
        "pyparallel/gossip/algorithms/fragments.py",
        "each.copy_(torch.lerp(new, widened(each), mix) if mix else new)",
        "each.copy_(new)",
        "tests/gossip/algorithms/test_streaming.py",
    ),
    Fault(
        "copies of tied weights keep the average after consensus()",
        "pyparallel/pipeline/pipeline.py",
        "            inside.enter_context(assigned(copies, copies))\n",
        "",
        "tests/pipeline/test_replicas.py",
    ),
    Fault(
        "an update does not wait for the last round with other replicas",
        "pyparallel/planning/pipelines/event_loop.py",
        "                needed |= last_round.get(stage, set())\n",
        "",
        "tests/planning/pipelines/test_event_loop.py",
    ),
    Fault(
        "a state is saved without what is in flight",
        "pyparallel/gossip/algorithms/periodic.py",
        "            each.load_in_flight(in_flight)\n",
        "            each.load_in_flight(None)\n",
        "tests/gossip/test_checkpoint.py",
    ),
    Fault(
        "AD-PSGD's active rank takes the whole difference",
        "pyparallel/gossip/algorithms/pair_messages.py",
        "alpha=-0.5",
        "alpha=-1.0",
        "tests/gossip/algorithms/test_pairwise.py",
    ),
    Fault(
        "a node does not gather the shards that a round has changed",
        "pyparallel/gossip/algorithms/node_averager.py",
        """        with self._gather_if_changed():
            self.inner.after_step()""",
        "        self.inner.after_step()",
        "tests/gossip/algorithms/test_hierarchical.py",
    ),
    Fault(
        "a scaled step that is skipped takes the infinite gradients",
        "pyparallel/optim/finite_steps.py",
        "if float(found_inf):",
        "if False:",
        "tests/gossip/test_finite_steps.py",
    ),
    # Pipelines
    Fault(
        "weight stashing reads the live version in the backward",
        "pyparallel/pipeline/schedules/versions.py",
        """        return self.policy.forward(counters, stage)

    @override
    def backward(self, counters: VersionCounters, stage: int) -> WeightVersion:
        return self.policy.forward(counters, stage)""",
        """        return self.policy.forward(counters, stage)

    @override
    def backward(self, counters: VersionCounters, stage: int) -> WeightVersion:
        return self.policy.backward(counters, stage)""",
        "tests/planning/pipelines tests/pipeline/schedules tests/pipeline/test_reference.py",
    ),
    Fault(
        "a delayed version is off by one",
        "pyparallel/pipeline/schedules/versions.py",
        "np.maximum(counters.update - self.updates, 0)",
        "np.maximum(counters.update - self.updates - 1, 0)",
        "tests/planning/pipelines tests/pipeline/schedules tests/pipeline/test_reference.py",
    ),
    Fault(
        "weights are predicted one update too far",
        "pyparallel/pipeline/schedules/versions.py",
        "WeightVersion(counters.first_forward, counters.update - counters.first_forward)",
        "WeightVersion(counters.first_forward, counters.update - counters.first_forward + 1)",
        "tests/planning/pipelines tests/pipeline/schedules tests/pipeline/test_reference.py",
    ),
    Fault(
        "gradients are kept across an update",
        "pyparallel/pipeline/runtime/stage.py",
        """        for optimizer in self.optimizers:
            optimizer.zero_grad(set_to_none=True)
        if not""",
        "        if not",
        "tests/pipeline/test_equivalence.py",
    ),
    Fault(
        "the last update is repeated once too often",
        "pyparallel/pipeline/prediction/last_update.py",
        "torch.add(buffer, update, alpha=horizon, out=output)",
        "torch.add(buffer, update, alpha=horizon + 1, out=output)",
        "tests/pipeline/prediction/test_last_update.py",
    ),
    Fault(
        "error feedback takes an update back instead of extrapolating it",
        "pyparallel/pipeline/prediction/corrections.py",
        "buffer.add_(before.sub_(update), alpha=self._coefficient)",
        "buffer.sub_(before.sub_(update), alpha=self._coefficient)",
        "tests/pipeline/prediction/test_corrections.py",
    ),
    Fault(
        "the second of several optimizers predicts the first one's weights",
        "pyparallel/pipeline/prediction/base.py",
        "list(islice(rest, count))",
        "list(out[:count])",
        "tests/pipeline/test_equivalence.py",
    ),
    Fault(
        "a payload is used before it has arrived",
        "pyparallel/pipeline/messages/channel.py",
        "        self._attempt(work.wait)\n        return payload",
        "        return payload",
        "tests/pipeline/messages/test_channel.py tests/pipeline/test_equivalence.py",
    ),
    Fault(
        "the header of a payload over NCCL is sent before it",
        "pyparallel/pipeline/messages/channel.py",
        """            self._attempt(self._payloads.send, header.stream, payload)
            return [self._isend(message, _HEADER_TAG)]""",
        """            sent = self._isend(message, _HEADER_TAG)
            self._attempt(self._payloads.send, header.stream, payload)
            return [sent]""",
        "tests/pipeline/messages/test_channel.py",
    ),
    Fault(
        "neighbors of a rank share a process group on NCCL",
        "pyparallel/pipeline/messages/groups.py",
        "        return 2 * (lower % 2)",
        "        return 0",
        "tests/pipeline/gpu/test_nccl.py",
    ),
    Fault(
        "a message has room for a payload that is not received yet",
        "pyparallel/pipeline/messages/channel.py",
        "new_header(self._rooms_received[len(self._headers)])",
        "new_header(self._rooms_received[-1])",
        "tests/pipeline/messages/test_channel.py",
    ),
    Fault(
        "a backward reads the weights that autograd saved in the forward",
        "pyparallel/pipeline/runtime/weight_copies.py",
        "        if owner is current:",
        "        if True:",
        "tests/pipeline/runtime/test_stage_weights.py",
    ),
    Fault(
        "a microbatch's loss counts as a whole step's",
        "pyparallel/pipeline/runtime/loss.py",
        "share = splitter.share(microbatch) / self.options.steps_per_update",
        "share = 1 / self.options.steps_per_update",
        "tests/pipeline/test_equivalence.py",
    ),
    Fault(
        "an update over several steps is the mean of their means",
        "pyparallel/pipeline/runtime/loss.py",
        "return weights[-1] / next((each for each in weights if each), 1.0)",
        "return 1.0",
        "tests/pipeline/runtime/test_losses.py",
    ),
    Fault(
        "evaluation leaves microbatches in flight",
        "pyparallel/pipeline/trainer.py",
        """        if self._pipeline is not None:
            self._pipeline.drain()
        batch =""",
        "        batch =",
        "tests/pipeline/test_trainer.py",
    ),
    Fault(
        "a batch is trained on with a target of other samples",
        "pyparallel/pipeline/runtime/microbatches.py",
        "if given and given != wanted:",
        "if False:",
        "tests/pipeline/runtime/test_bad_batches.py",
    ),
    Fault(
        "a microbatch's loss counts alike whatever its tokens",
        "pyparallel/pipeline/runtime/microbatches.py",
        "return weights[microbatch - self.first] / (sum(weights) or 1)",
        "return 1 / len(weights)",
        "tests/pipeline/runtime/test_batches.py",
    ),
    Fault(
        "the mask of a language model does not travel to the next stage",
        "pyparallel/pipeline/partition/attention_layers.py",
        "for each in self[1:] if each is not None)",
        "for each in self[2:] if each is not None)",
        "tests/pipeline/partition/test_split_model.py",
    ),
    Fault(
        "the blocks with a sliding window see the whole sequence",
        "pyparallel/pipeline/partition/attention_layers.py",
        "return list(types)",
        'return ["full_attention"] * num_blocks',
        "tests/pipeline/partition/test_split_model.py",
    ),
    Fault(
        "packed sequences attend to each other",
        "pyparallel/pipeline/partition/attention_layers.py",
        "position_ids=position_ids,  # given",
        "position_ids=None,  # given",
        "tests/pipeline/partition/test_split_model.py",
    ),
    Fault(
        "the head of a ResNet drops nothing out",
        "pyparallel/pipeline/partition/families.py",
        "dropout(features, float(model.drop_rate), model.fc.training)",
        "dropout(features, float(model.drop_rate), False)",
        "tests/pipeline/partition/test_split_model.py",
    ),
    Fault(
        "gradients are clipped by the norm of one rank",
        "pyparallel/pipeline/runtime/clipping.py",
        "Collectives(run).all_reduce_(total)",
        "pass",
        "tests/pipeline/runtime/test_clipping.py",
    ),
    Fault(
        "the norms of earlier stages do not count where nothing is flushed",
        "pyparallel/pipeline/runtime/clipping.py",
        "(self._own.sum(), self._later, self._earlier)",
        "(self._own.sum(), self._later)",
        "tests/pipeline/runtime/test_clipping.py",
    ),
    Fault(
        "a window ends one loss too early",
        "pyparallel/pipeline/interlocking/window.py",
        "return min(stage + self.size - 1, self.num_stages - 1)",
        "return max(stage, min(stage + self.size - 2, self.num_stages - 1))",
        "tests/pipeline/interlocking/test_window.py",
    ),
    Fault(
        "the mean of a window counts all earlier losses",
        "pyparallel/pipeline/interlocking/window.py",
        "return 1 / (farthest - stage + 1)",
        "return 1 / (farthest + 1)",
        "tests/pipeline/interlocking/test_training.py",
    ),
    Fault(
        "a loaded state is not laid out again",
        "pyparallel/optim/bucket.py",
        "if not all(map(is_, found, entered)):",
        "if not any(entered):",
        "tests/pipeline/prediction/test_contract.py",
    ),
    Fault(
        "a backward runs inside the caller's autocast",
        "pyparallel/pipeline/runtime/preserve_state.py",
        "torch.autocast(kind, enabled=False)",
        "torch.autocast(kind, enabled=True)",
        "tests/pipeline/precision/test_autocast.py",
    ),
    # Subnets
    Fault(
        "a flush merges nothing where one rank has no steps",
        "pyparallel/subnets/trainer.py",
        """            if any(steps for _, steps in calls):
                self._begin_round()

    @contextmanager""",
        """            if all(steps for _, steps in calls):
                self._begin_round()

    @contextmanager""",
        "tests/subnets/test_trainer.py",
    ),
    Fault(
        "the optimizer's state stays when units move",
        "pyparallel/subnets/subnet_parts.py",
        "*self.shards.state_tensors(states)]",
        "]",
        "tests/subnets/test_invariants.py",
    ),
    Fault(
        "all rounds draw the same units",
        "pyparallel/subnets/subnet_parts.py",
        "self.partition.draw(self.cut_dims, round_index,",
        "self.partition.draw(self.cut_dims, 0,",
        "tests/subnets/test_invariants.py",
    ),
    Fault(
        "a rank without an infinity updates although another has one",
        "pyparallel/pipeline/runtime/clipping.py",
        "Collectives(self._run).all_reduce_(found_inf)",
        "pass",
        "tests/pipeline/precision/test_loss_scale.py",
    ),
    Fault(
        "the gradients of tied weights are not summed over ranks",
        "pyparallel/pipeline/partition/tied_parameters.py",
        "ranks.all_reduce_(total)",
        "pass",
        "tests/pipeline/partition/test_skips.py",
    ),
    Fault(
        "the copies of tied weights do not follow their owner",
        "pyparallel/pipeline/partition/tied_parameters.py",
        "ranks.broadcast_(parameter.data, owner)",
        "pass",
        "tests/pipeline/partition/test_skips.py",
    ),
    Fault(
        "a tied weight that travels is a view of memory that changes",
        "pyparallel/pipeline/runtime/stage_layers.py",
        "skips[name] = parameter.clone()",
        "skips[name] = parameter.view_as(parameter)",
        "tests/pipeline/partition/test_skips.py",
    ),
    Fault(
        "a checkpoint by names loads no optimizer state",
        "pyparallel/pipeline/named_state.py",
        'loaded["state"][number] = saved[_STATE]',
        "pass",
        "tests/pipeline/partition/test_named_state.py",
    ),
    Fault(
        "a checkpoint by names keeps the learning rates of now",
        "pyparallel/pipeline/named_state.py",
        "            group[key] = value\n",
        "            pass\n",
        "tests/pipeline/partition/test_named_state.py",
    ),
    Fault(
        "an algorithm around others takes one that averages gradients",
        "pyparallel/training/algorithm.py",
        "place.is_inner and not self.can_be_inner",
        "False",
        "tests/gossip/algorithms/test_mistakes.py",
    ),
    Fault(
        "messages are received before every closure",
        "pyparallel/training/step_hook.py",
        'known = ("torch.optim.", "pyparallel.optim.")',
        "known = ()",
        "tests/gossip/test_closures.py",
    ),
    Fault(
        "a frozen parameter of the optimizer is taken for a new one",
        "pyparallel/training/buckets.py",
        "added = sum(p.requires_grad or p.grad is not None for p in others)",
        "added = sum(True for p in others)",
        "tests/gossip/test_trainer.py",
    ),
    # Ops and steps
    Fault(
        "SGD damps the first gradient of a parameter",
        "pyparallel/optim/sgd.py",
        "damped = name == _MOMENTUM and bucket.has(name, span.first)",
        "damped = name == _MOMENTUM",
        "tests/optim/test_steps.py",
    ),
    Fault(
        "a fused step predicts from weights that are not rounded to their dtype",
        "pyparallel/ops/sgd_step.py",
        "predict_sgd_reference(param, velocity, lr / shared.mass",
        "predict_sgd_reference(z, velocity, lr / shared.mass",
        "tests/ops/test_sgd_step.py",
    ),
    Fault(
        "top-k keeps the threshold of the step before",
        "pyparallel/ops/top_k.py",
        "threshold.copy_(largest[len(values) - 1].view(torch.float32))",
        "pass",
        "tests/ops/test_top_k.py",
    ),
    Fault(
        "int8 rounds down instead of to nearest",
        "pyparallel/ops/_formats.py",
        "whole = scaled.round() if",
        "whole = scaled.floor() if",
        "tests/ops/test_quantize.py",
    ),
    Fault(
        "the prediction of Adam corrects the bias of the step before",
        "pyparallel/ops/predict_adam.py",
        "correction = (1 - beta2**step).sqrt()",
        "correction = (1 - beta2 ** (step - 1)).sqrt()",
        "tests/ops/test_predict_adam.py",
    ),
    Fault(
        "a nested optimizer step counts as another step",
        "pyparallel/training/step_hook.py",
        """        self._depth -= 1
        if self._depth == 0:""",
        """        self._depth -= 1
        if True:""",
        "tests/training/test_step_hook.py",
    ),
    Fault(
        "headers of messages are not compared",
        "pyparallel/gossip/messages/header.py",
        "if row[counts.TRAINER : counts.NONFINITE] != own:",
        "if False:",
        "tests/gossip/messages/test_header.py",
    ),
    Fault(
        "an extra state that JSON would change is sent",
        "pyparallel/pipeline/full_state.py",
        "repr(json.loads(json.dumps(value))) == repr(value)",
        "bool(json.dumps(value))",
        "tests/pipeline/partition/test_named_state.py",
    ),
    Fault(
        "checksums of tensors are not compared",
        "pyparallel/training/state_format.py",
        "if isinstance(leaf, Tensor) and checksum(leaf) != checksums",
        "if False and checksum(leaf) != checksums",
        "tests/training/test_state_format.py tests/test_saved_states.py",
    ),
    Fault(
        "each rank raises what it has found of a rank that died",
        "pyparallel/pipeline/runtime/executor.py",
        "return self._p2p.agree_on_error(message, without_store), message",
        "return message, message",
        "tests/pipeline/test_deaths.py",
    ),
    Fault(
        "ranks that fail together wait for each other's aborts",
        "pyparallel/pipeline/messages/channel.py",
        "[message], self.peer, _HEADER_TAG)\n                self._post_receives()\n",
        "[message], self.peer, _HEADER_TAG)\n",
        "tests/pipeline/test_deaths.py",
    ),
    Fault(
        "staleness is what the prediction leaves of it",
        "pyparallel/pipeline/runtime/telemetry.py",
        "weights.version - read.version,",
        "weights.version - read.version - read.horizon,",
        "tests/pipeline/runtime/test_telemetry.py",
    ),
    Fault(
        "new shapes begin while sends of other ranks are not received",
        "pyparallel/pipeline/messages/stage_p2p.py",
        "if self._has_new_inputs and not had_new_inputs:",
        "if False:",
        "tests/pipeline/gpu/test_nccl.py",
    ),
    Fault(
        "the row of an average's header is freed while it is sent",
        "pyparallel/gossip/messages/averages.py",
        "kept = [row, of_ranks]",
        "kept = [of_ranks]",
        "tests/test_stream_lifetimes.py",
    ),
    Fault(
        "all waits are for other ranks",
        "pyparallel/pipeline/messages/stage_p2p.py",
        "self.waited[kind] +=",
        "self.waited[None] +=",
        "tests/pipeline/runtime/test_telemetry.py",
    ),
]


def main() -> int:
    """Plant each fault and run its tests."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", default="", help="a part of the names of the faults to plant")
    options = parser.parse_args()
    failed = False
    with tempfile.TemporaryDirectory() as folder:
        for each in ("pyparallel", "csrc", "tests", "kernels", "benchmarks", "examples", "docs"):
            shutil.copytree(ROOT / each, Path(folder) / each)
        for each in ("pyproject.toml", "README.md", "CMakeLists.txt", "setup.py"):
            shutil.copy(ROOT / each, folder)
        for fault in FAULTS:
            if options.only in fault.name:
                caught = _catch(fault, Path(folder))
                failed |= caught is None
                print(f"{'caught' if caught else 'NOT CAUGHT'}: {fault.name}: {caught}", flush=True)
    return int(failed)


def _catch(fault: Fault, folder: Path) -> str | None:
    """Return the first test that fails with a fault planted and passes without, or None."""
    path = folder / fault.path
    before = path.read_text()
    if before.count(fault.text) != 1:
        raise ValueError(f"{fault.path} must hold {fault.text!r} once, for {fault.name!r}")
    path.write_text(before.replace(fault.text, fault.replacement))
    try:
        caught = _first_failure(fault.tests, folder)
    finally:
        path.write_text(before)
    # Other reasons to fail, such as a file that was not copied, would hide that nothing is caught.
    failing = _first_failure(fault.tests if caught is None else caught.split("[")[0], folder)
    if failing is not None:
        raise ValueError(f"{fault.tests} must pass without {fault.name!r}, but {failing} fails")
    return caught


def _first_failure(tests: str, folder: Path) -> str | None:
    """Run tests, then slow ones too if no other fails; return the first that fails, or None."""
    options = ["-x", "-q", "-p", "no:cacheprovider", "-n", "2", "--dist", "loadfile"]
    for marks in ("not slow", "slow and not nightly"):
        run = subprocess.run(
            ["timeout", str(LIMIT_SECONDS), sys.executable, "-m", "pytest", "-m", marks, *options,
             *tests.split()],
            check=False,
            cwd=folder,
            env={**os.environ, "PYTHONPATH": str(folder)},
            capture_output=True,
            text=True,
        )  # fmt: skip
        if found := re.search(r"^(?:FAILED|ERROR) (\S+)", run.stdout, re.MULTILINE):
            return found[1]
        if run.returncode not in (pytest.ExitCode.OK, pytest.ExitCode.NO_TESTS_COLLECTED):
            return tests  # it did not end in time, or crashed
    return None


if __name__ == "__main__":
    raise SystemExit(main())
