#include "pool.h"

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstdlib>
#include <mutex>
#include <sched.h>
#include <thread>
#include <unistd.h>
#include <vector>

#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace llmx_pool {
namespace {

constexpr auto PATIENCE = std::chrono::microseconds(150);  // longer than Python needs from one op to the next
constexpr int SPINS = 64;  // between looks at the clock: a pause is 3 cycles on some processors, 140 on others
constexpr int MOST = 256;

inline void relax() {
#if defined(__x86_64__)
  _mm_pause();
#endif
}

struct Scratch {
  void* memory = nullptr;
  int64_t size = 0;
};

constexpr int TASK_BITS = 20;
constexpr uint64_t TASK_MASK = (uint64_t{1} << TASK_BITS) - 1;

inline uint32_t number_of(uint64_t word) { return static_cast<uint32_t>(word >> 2 * TASK_BITS); }
inline uint64_t word_of(uint32_t number, int64_t tasks) {
  return static_cast<uint64_t>(number) << 2 * TASK_BITS | static_cast<uint64_t>(tasks) << TASK_BITS;
}

// One job at a time. `next` holds the job's number, how many tasks it has and the next one: who comes late finds
// another number or no task and fails to claim. `run` and `context` are read after a claim, and not rewritten before
// the last claimed task is done.
struct Pool {
  std::mutex one;  // job at a time
  std::atomic<uint64_t> next{0};
  std::atomic<int64_t> done{0};
  Task run = nullptr;
  void* context = nullptr;
  std::atomic<int> wanted{0};  // threads that may help
  std::atomic<int> asleep{0};
  std::mutex sleep;
  std::condition_variable wake;
  std::vector<std::thread> threads;
  Scratch scratch[MOST];
  pid_t owner = getpid();

  void work(uint32_t job, int thread) {
    int64_t finished = 0;
    for (;;) {
      uint64_t seen = next.load(std::memory_order_acquire);
      const uint64_t task = seen & TASK_MASK;
      if (number_of(seen) != job || task >= (seen >> TASK_BITS & TASK_MASK)) break;
      if (!next.compare_exchange_weak(seen, seen + 1, std::memory_order_acq_rel)) continue;
      run(context, static_cast<int64_t>(task), thread);
      ++finished;
    }
    if (finished) done.fetch_add(finished, std::memory_order_acq_rel);
  }

  void serve(int thread) {
    uint32_t last = 0;
    for (;;) {
      uint32_t job = 0;
      auto since = std::chrono::steady_clock::now();
      for (;;) {
        for (int spins = 0; spins < SPINS; ++spins) {
          job = number_of(next.load(std::memory_order_acquire));
          if (job != last) break;
          relax();
        }
        if (job != last) break;
        if (std::chrono::steady_clock::now() - since < PATIENCE) continue;
        std::unique_lock<std::mutex> lock(sleep);
        asleep.fetch_add(1, std::memory_order_seq_cst);
        wake.wait(lock, [&] { return number_of(next.load(std::memory_order_seq_cst)) != last; });
        asleep.fetch_sub(1, std::memory_order_seq_cst);
        since = std::chrono::steady_clock::now();
      }
      last = job;
      if (thread < wanted.load(std::memory_order_acquire)) work(job, thread);
    }
  }
};

// Never destroyed: its threads may be running when the process ends.
std::atomic<Pool*> current{nullptr};
std::mutex making;

Pool& pool() {
  Pool* found = current.load(std::memory_order_acquire);
  if (found != nullptr && found->owner == getpid()) return *found;  // a forked child has none of its parent's threads
  std::lock_guard<std::mutex> lock(making);
  found = current.load(std::memory_order_acquire);
  if (found == nullptr || found->owner != getpid()) {
    found = new Pool;
    current.store(found, std::memory_order_release);
  }
  return *found;
}

}  // namespace

void each(Task run, void* context, int64_t tasks, int threads) {
  if (threads > MOST) threads = MOST;
  Pool& p = pool();
  std::unique_lock<std::mutex> job(p.one, std::try_to_lock);
  if (threads <= 1 || tasks <= 1 || !job.owns_lock()) {  // busy for another thread of this process: alone, then
    if (!job.owns_lock()) job.lock();  // the scratch memory is the pool's
    for (int64_t t = 0; t < tasks; ++t) run(context, t, 0);
    return;
  }
  while (static_cast<int>(p.threads.size()) < threads - 1) {
    const int thread = static_cast<int>(p.threads.size()) + 1;
    p.threads.emplace_back([&p, thread] { p.serve(thread); });
    p.threads.back().detach();
  }
  const uint32_t number = number_of(word_of(number_of(p.next.load(std::memory_order_relaxed)) + 1, 0));  // it wraps
  p.run = run, p.context = context;
  p.done.store(0, std::memory_order_relaxed);
  p.wanted.store(threads, std::memory_order_relaxed);
  p.next.store(word_of(number, tasks), std::memory_order_seq_cst);
  if (p.asleep.load(std::memory_order_seq_cst) > 0) {
    { std::lock_guard<std::mutex> lock(p.sleep); }
    p.wake.notify_all();
  }
  p.work(number, 0);
  const auto since = std::chrono::steady_clock::now();
  for (int spins = 1; p.done.load(std::memory_order_acquire) != tasks; ++spins)
    if (spins % SPINS == 0 && std::chrono::steady_clock::now() - since > PATIENCE)
      sched_yield();  // another thread holds the last task, and may be waiting for this core
    else
      relax();
}

void* scratch(int thread, int64_t bytes) {
  Scratch& mine = pool().scratch[thread];
  if (mine.size < bytes) {
    std::free(mine.memory);
    mine.size = (bytes + 4095) / 4096 * 4096;
    mine.memory = std::aligned_alloc(4096, static_cast<size_t>(mine.size));
  }
  return mine.memory;
}

}  // namespace llmx_pool
