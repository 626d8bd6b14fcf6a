// The event loop of pyparallel/planning/pipelines/event_loop.py, equal to its run_reference bit
// for bit. It does not use torch, so it is a Python module, not an op.
#include <pybind11/numpy.h>
#include <pybind11/pybind11.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <limits>
#include <stdexcept>
#include <string>
#include <tuple>
#include <vector>

namespace py = pybind11;

namespace {

enum Kind : int32_t { kForward, kBackward, kBackwardInput, kBackwardWeight, kUpdate, kKinds };

constexpr double kUnknown = std::numeric_limits<double>::quiet_NaN();

struct Row {
  int32_t stage, kind, microbatch;
};

template <class T>
using Array = py::array_t<T, py::array::c_style | py::array::forcecast>;

class EventLoop {
 public:
  EventLoop(const Array<int32_t>& rows, const Array<int64_t>& offsets, const Array<int64_t>& homes,
            const Array<double>& durations, const Array<double>& latencies,
            int64_t num_microbatches)
      : rows_(reinterpret_cast<const Row*>(rows.data())),
        bounds_(offsets.data(), offsets.data() + offsets.size()),
        homes_(homes.data(), homes.data() + homes.size()),
        durations_(durations.data()),
        latencies_(latencies.data()),
        num_stages_(homes.size()),
        num_microbatches_(num_microbatches) {
    check(rows, durations, latencies);
    next_.assign(bounds_.begin(), bounds_.end() - 1);
    free_.assign(next_.size(), 0.0);
    const auto places = static_cast<size_t>(num_stages_ * num_microbatches_);
    forward_ends_.assign(places, kUnknown);
    backward_ends_.assign(places, kUnknown);
    weight_ends_.assign(places, kUnknown);
    round_ends_.assign(static_cast<size_t>(num_stages_), 0.0);
  }

  // Advances every rank as far as possible, and again those whose input has arrived.
  void run(double* starts) {
    std::fill_n(starts, bounds_.back(), kUnknown);
    for (size_t rank = 0; rank < next_.size(); ++rank)
      runnable_.push_back(static_cast<int64_t>(rank));
    while (!runnable_.empty()) {
      const int64_t rank = runnable_.back();
      runnable_.pop_back();
      advance(rank, starts);
    }
  }

  int64_t done(size_t rank) const { return next_[rank] - bounds_[rank]; }
  size_t num_ranks() const { return next_.size(); }

 private:
  void check(const Array<int32_t>& rows, const Array<double>& durations,
             const Array<double>& latencies) const {
    const bool shapes = rows.ndim() == 2 && rows.shape(1) == 3 && !bounds_.empty() &&
                        durations.size() == kKinds * num_stages_ &&
                        latencies.size() == 2 * num_stages_ && num_microbatches_ >= 0;
    if (!shapes) throw std::invalid_argument("arrays must have the shapes of an ActionTable");
    const auto num_ranks = static_cast<int64_t>(bounds_.size()) - 1;
    const bool ordered = bounds_.front() == 0 && bounds_.back() == rows.shape(0) &&
                         std::is_sorted(bounds_.begin(), bounds_.end());
    if (!ordered) throw std::invalid_argument("offsets must ascend from 0 to the number of rows");
    for (const int64_t home : homes_)
      if (home < 0 || home >= num_ranks)
        throw std::invalid_argument("rank_of_stage must name ranks below " +
                                    std::to_string(num_ranks) + ", got " + std::to_string(home));
    for (int64_t i = 0; i < bounds_.back(); ++i) {
      const Row row = rows_[i];
      if (row.stage < 0 || row.stage >= num_stages_ || row.kind < 0 || row.kind >= kKinds ||
          row.microbatch < 0 || row.microbatch >= num_microbatches_)
        throw std::invalid_argument("rows must lie within stages, kinds and microbatches, row " +
                                    std::to_string(i) + " does not");
    }
  }

  void advance(int64_t rank, double* starts) {
    const int64_t end_of_rank = bounds_[rank + 1];
    for (int64_t& next = next_[rank]; next < end_of_rank; ++next) {
      const Row row = rows_[next];
      const double ready = when_ready(row);
      if (std::isnan(ready)) return;
      const double start = std::max(free_[rank], ready);
      const double end = start + durations_[row.kind * num_stages_ + row.stage];
      starts[next] = start;
      free_[rank] = end;
      finish(row, end);
    }
  }

  size_t place(const Row& row, int64_t stage) const {
    return static_cast<size_t>(stage * num_microbatches_ + row.microbatch);
  }

  // The time when the last input of a row arrives; NaN: not yet known.
  double when_ready(const Row& row) const {
    const int64_t stage = row.stage;
    const size_t here = place(row, stage);
    switch (row.kind) {
      case kForward:
        return stage == 0 ? 0.0 : arrival(forward_ends_, row, stage - 1, stage - 1);
      case kBackwardWeight:
        return backward_ends_[here];
      case kUpdate: {
        const double own = weight_ends_[here];
        return std::isnan(own) ? kUnknown : std::max(own, round_ends_[stage]);
      }
      default: {
        const double own = forward_ends_[here];
        if (stage + 1 == num_stages_) return own;
        const double behind = arrival(backward_ends_, row, stage + 1, stage);
        return std::isnan(own) || std::isnan(behind) ? kUnknown : std::max(own, behind);
      }
    }
  }

  double arrival(const std::vector<double>& ends, const Row& row, int64_t source,
                 int64_t edge) const {
    const double end = ends[place(row, source)];
    return homes_[source] == homes_[row.stage] ? end : end + latencies_[edge];
  }

  // Records the end of a row, and wakes the rank that may have waited for it.
  void finish(const Row& row, double end) {
    const size_t here = place(row, row.stage);
    int64_t receiver = -1;
    if (row.kind == kForward) {
      forward_ends_[here] = end;
      receiver = row.stage + 1;
    }
    if (row.kind == kBackward || row.kind == kBackwardInput) {
      backward_ends_[here] = end;
      receiver = row.stage - 1;
    }
    if (row.kind == kBackward || row.kind == kBackwardWeight) weight_ends_[here] = end;
    if (row.kind == kUpdate) round_ends_[row.stage] = end + latencies_[num_stages_ + row.stage];
    if (receiver >= 0 && receiver < num_stages_) wake(homes_[receiver], homes_[row.stage], row);
  }

  void wake(int64_t rank, int64_t sender, const Row& row) {
    if (rank == sender || next_[rank] == bounds_[rank + 1]) return;
    // A rank that waits for another row stays asleep: the end of that row wakes it.
    const Row& waiting = rows_[next_[rank]];
    if (waiting.microbatch == row.microbatch) runnable_.push_back(rank);
  }

  const Row* rows_;
  std::vector<int64_t> bounds_, homes_;
  const double *durations_, *latencies_;
  int64_t num_stages_, num_microbatches_;
  std::vector<int64_t> next_;
  std::vector<double> free_, forward_ends_, backward_ends_, weight_ends_;
  std::vector<double> round_ends_;  // of each stage's last round with other replicas
  std::vector<int64_t> runnable_;
};

std::tuple<py::array_t<double>, py::array_t<int64_t>> run(
    const Array<int32_t>& rows, const Array<int64_t>& offsets, const Array<int64_t>& rank_of_stage,
    const Array<double>& durations, const Array<double>& latencies, int64_t num_microbatches) {
  EventLoop loop(rows, offsets, rank_of_stage, durations, latencies, num_microbatches);
  py::array_t<double> starts(rows.shape(0));
  double* out = starts.mutable_data();
  {
    const py::gil_scoped_release others_may_run;
    loop.run(out);
  }
  py::array_t<int64_t> done(static_cast<py::ssize_t>(loop.num_ranks()));
  for (size_t rank = 0; rank < loop.num_ranks(); ++rank)
    done.mutable_data()[rank] = loop.done(rank);
  return {starts, done};
}

}  // namespace

PYBIND11_MODULE(simulate, module) {
  module.doc() = "The event loop of pyparallel.planning.pipelines.simulate, compiled.";
  module.def("run", &run, py::arg("rows"), py::arg("offsets"), py::arg("rank_of_stage"),
             py::arg("durations"), py::arg("latencies"), py::arg("num_microbatches"),
             "See run_reference in pyparallel/planning/pipelines/event_loop.py.");
}
