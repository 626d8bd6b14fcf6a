#pragma once

#include <ucontext.h>

#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <functional>
#include <memory>
#include <vector>

// One block of CUDA threads as fibers of one CPU thread: each runs until it waits for the others,
// then the next one runs. A barrier that some thread never reaches ends the process with an error.
namespace emulator {

constexpr int kWarp = 32;
constexpr size_t kStackBytes = 256 << 10;

enum class State { kReady, kWaitsForWarp, kWaitsForBlock, kDone };

struct Fiber {
  ucontext_t context;
  std::unique_ptr<char[]> stack{new char[kStackBytes]};
  State state = State::kReady;
  uint64_t slot = 0;  // readable by the other lanes of the warp
};

class Block {
 public:
  static Block& current() {
    static Block block;
    return block;
  }

  void run(int num_threads, const std::function<void()>& body) {
    body_ = &body;
    num_threads_ = num_threads;
    while (static_cast<int>(fibers_.size()) < num_threads) fibers_.emplace_back(new Fiber);
    for (int i = 0; i < num_threads; ++i) start(*fibers_[i]);
    while (step()) {
    }
  }

  int thread() const { return thread_; }
  int num_threads() const { return num_threads_; }
  uint64_t& slot(int thread) { return fibers_[thread]->slot; }
  bool is_done(int thread) const { return fibers_[thread]->state == State::kDone; }

  void wait(State state) {
    Fiber& fiber = *fibers_[thread_];
    fiber.state = state;
    swapcontext(&fiber.context, &scheduler_);
  }

 private:
  void start(Fiber& fiber) {
    getcontext(&fiber.context);
    fiber.context.uc_stack.ss_sp = fiber.stack.get();
    fiber.context.uc_stack.ss_size = kStackBytes;
    fiber.context.uc_link = &scheduler_;
    fiber.state = State::kReady;
    makecontext(&fiber.context, &Block::enter, 0);
  }

  static void enter() {
    Block& block = current();
    (*block.body_)();
    block.fibers_[block.thread_]->state = State::kDone;
  }

  // Runs every runnable thread; false when all are done.
  bool step() {
    bool progress = false, all_done = true;
    for (int i = 0; i < num_threads_; ++i) {
      if (fibers_[i]->state == State::kReady) {
        thread_ = i;
        swapcontext(&scheduler_, &fibers_[i]->context);
        progress = true;
      }
      all_done = all_done && fibers_[i]->state == State::kDone;
    }
    for (int i = 0; i < num_threads_; i += kWarp) {
      progress |= release(i, std::min(i + kWarp, num_threads_), State::kWaitsForWarp);
    }
    progress |= release(0, num_threads_, State::kWaitsForBlock);
    if (!progress && !all_done) {
      std::fprintf(stderr, "emulator: some threads wait at a barrier that others never reach\n");
      std::abort();
    }
    return !all_done;
  }

  // Threads that have returned no longer take part in barriers, as on the device.
  bool release(int begin, int end, State state) {
    bool any = false;
    for (int i = begin; i < end; ++i) {
      if (fibers_[i]->state != state && fibers_[i]->state != State::kDone) return false;
      any = any || fibers_[i]->state == state;
    }
    for (int i = begin; i < end; ++i) {
      if (fibers_[i]->state == state) fibers_[i]->state = State::kReady;
    }
    return any;
  }

  ucontext_t scheduler_;
  const std::function<void()>* body_ = nullptr;
  std::vector<std::unique_ptr<Fiber>> fibers_;
  int num_threads_ = 0, thread_ = 0;
};

}  // namespace emulator
