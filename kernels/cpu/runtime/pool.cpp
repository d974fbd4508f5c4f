#include "pool.h"

#include "crowd.h"

#include <atomic>
#include <condition_variable>
#include <cstdlib>
#include <mutex>
#include <system_error>
#include <thread>

#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace llmx_pool {
namespace {

constexpr int64_t PATIENCE = 150000;  // ns: longer than Python needs from one op to the next
constexpr int SPINS = 64;  // between looks at the clock: a pause is 3 cycles on some processors, 140 on others
constexpr int MOST = 256;

inline void relax() {
#if defined(__x86_64__)
  _mm_pause();
#endif
}

constexpr int TASK_BITS = 20;
constexpr uint64_t TASK_MASK = (uint64_t{1} << TASK_BITS) - 1;

inline uint32_t number_of(uint64_t word) { return static_cast<uint32_t>(word >> 2 * TASK_BITS); }
inline int64_t tasks_of(uint64_t word) { return static_cast<int64_t>(word >> TASK_BITS & TASK_MASK); }
inline uint64_t word_of(uint32_t number, int64_t tasks) {
  return static_cast<uint64_t>(number) << 2 * TASK_BITS | static_cast<uint64_t>(tasks) << TASK_BITS;
}

// Where a thread sleeps until somebody has a reason to wake it: whoever makes its condition true looks at `asleep`
// afterwards, and the sleeper at its condition after setting it. Both in one order, so that one sees the other.
struct alignas(64) Bed {
  std::atomic<bool> asleep{false};
  std::mutex mutex;
  std::condition_variable bell;

  template <class Condition> void sleep(const Condition& condition) {
    std::unique_lock<std::mutex> lock(mutex);
    asleep.store(true, std::memory_order_seq_cst);
    bell.wait(lock, condition);
    asleep.store(false, std::memory_order_seq_cst);
  }
  void wake() {
    if (!asleep.load(std::memory_order_seq_cst)) return;
    { std::lock_guard<std::mutex> lock(mutex); }
    bell.notify_one();
  }
};

// Of each thread; number 0 is whoever calls.
struct Member {
  Bed bed;
  Delay delay;
  std::atomic<bool> ready{false};  // its delay can be read
  void* memory = nullptr;
  int64_t size = 0;
};

// One job at a time. `next` holds the job's number, how many tasks it has and the next one: who comes late finds
// another number or no task and fails to claim. `run` and `context` are read after a claim, and not rewritten before
// the last claimed task is done.
struct Pool {
  std::mutex one;  // job at a time
  alignas(64) std::atomic<uint64_t> next{0};
  std::atomic<int> wanted{0};  // threads that may help
  Task run = nullptr;
  void* context = nullptr;
  alignas(64) std::atomic<int64_t> done{0};
  std::thread::id caller;
  Crowd crowd;
  int helpers = 0;
  bool full = false;  // the system gives no more threads
  Member members[MOST];

  int64_t work(uint32_t job, int thread) {
    int64_t finished = 0;
    for (;;) {
      uint64_t seen = next.load(std::memory_order_acquire);
      const uint64_t task = seen & TASK_MASK;
      if (number_of(seen) != job || static_cast<int64_t>(task) >= tasks_of(seen)) break;
      if (!next.compare_exchange_weak(seen, seen + 1, std::memory_order_acq_rel)) continue;
      run(context, static_cast<int64_t>(task), thread);
      ++finished;
    }
    if (finished) done.fetch_add(finished, std::memory_order_seq_cst);
    return finished;
  }

  // A helper's life: spin a little for the next job, then sleep.
  void serve(int thread) {
    members[thread].delay.open();
    members[thread].ready.store(true, std::memory_order_release);
    uint32_t last = 0;
    int64_t since = 0;  // when it began to wait; 0: not known yet
    uint32_t job = 0;
    const auto called = [&] {  // `wanted` is read after `next`: if it isn't that job's, the job is over
      job = number_of(next.load(std::memory_order_seq_cst));
      return job != last && thread < wanted.load(std::memory_order_seq_cst);
    };
    for (int spins = 1;; ++spins) {
      if (called()) {
        last = job;
        if (work(job, thread)) members[0].bed.wake();
        since = 0, spins = 0;
      } else if (spins % SPINS != 0) {
        relax();
      } else if (const int64_t at = now(); since == 0) {
        since = at;
      } else if (at - since > PATIENCE) {
        members[thread].bed.sleep(called);
        since = 0;
      }
    }
  }

  void add_helpers(int threads) {
    while (helpers < threads - 1 && !full) {
      const int thread = helpers + 1;
      try {
        std::thread made([this, thread] { serve(thread); });
        made.detach();
        ++helpers;
      } catch (const std::system_error&) {
        full = true;
      }
    }
  }

  void share(Task task, void* with, int64_t tasks, int team) {
    const uint32_t number = number_of(word_of(number_of(next.load(std::memory_order_relaxed)) + 1, 0));  // wraps
    run = task, context = with;
    done.store(0, std::memory_order_relaxed);
    wanted.store(team, std::memory_order_seq_cst);
    next.store(word_of(number, tasks), std::memory_order_seq_cst);
    for (int thread = 1; thread < team; ++thread) members[thread].bed.wake();
    work(number, 0);
    wait(tasks);
  }

  // Until others have done the last tasks. After a while asleep: a thread that lost its core can then have this one.
  void wait(int64_t tasks) {
    const auto finished = [&] { return done.load(std::memory_order_seq_cst) == tasks; };
    int64_t since = 0;
    for (int spins = 1; !finished(); ++spins) {
      relax();
      if (spins % SPINS != 0) continue;
      const int64_t at = now();
      if (since == 0) since = at;
      if (at - since > PATIENCE) return members[0].bed.sleep(finished);
    }
  }

  // Now and then: who of the team has been without a core, and for how long.
  void look(int team, int64_t at) {
    int64_t longest = 0, sum = 0;
    for (int thread = 0; thread < team; ++thread) {
      Member& m = members[thread];
      if (thread == 0 && caller != std::this_thread::get_id()) {
        caller = std::this_thread::get_id();
        m.delay.open();
      } else if (thread == 0 || m.ready.load(std::memory_order_acquire)) {
        const int64_t delay = m.delay.since_last();
        longest = delay > longest ? delay : longest, sum += delay;
      }
    }
    crowd.delayed(longest, sum, team, at);
  }
};

// Never destroyed: its threads may be running when the process ends.
std::atomic<Pool*> current{nullptr};
std::atomic_flag making = ATOMIC_FLAG_INIT;

// A forked child has none of its parent's threads.
void forget() {
  current.store(nullptr, std::memory_order_relaxed);
  making.clear(std::memory_order_relaxed);
}

Pool& pool() {
  Pool* found = current.load(std::memory_order_acquire);
  if (found != nullptr) return *found;
  while (making.test_and_set(std::memory_order_acquire)) std::this_thread::yield();
  found = current.load(std::memory_order_acquire);
  if (found == nullptr) {
    static const int watched = pthread_atfork(nullptr, nullptr, forget);
    (void)watched;
    found = new Pool;
    current.store(found, std::memory_order_release);
  }
  making.clear(std::memory_order_release);
  return *found;
}

}  // namespace

void each(Task run, void* context, int64_t tasks, int threads) {
  Pool& p = pool();
  std::unique_lock<std::mutex> job(p.one, std::try_to_lock);
  const bool busy = !job.owns_lock();  // with another thread of this process: this one works alone, then
  if (busy) job.lock();                // the scratch memory is the pool's
  if (!busy && threads > 1 && tasks > 1) {
    const int64_t at = now();
    int team = p.crowd.team(threads < MOST ? threads : MOST, at);
    p.add_helpers(team);
    team = team < p.helpers + 1 ? team : p.helpers + 1;
    if (team > 1 && p.crowd.due(at)) p.look(team, at);
    if (team > 1) return p.share(run, context, tasks, team < tasks ? team : static_cast<int>(tasks));
  }
  for (int64_t t = 0; t < tasks; ++t) run(context, t, 0);
}

void* scratch(int thread, int64_t bytes) {
  Member& mine = pool().members[thread];
  if (mine.size < bytes) {
    std::free(mine.memory);
    mine.size = (bytes + 4095) / 4096 * 4096;
    mine.memory = std::aligned_alloc(4096, static_cast<size_t>(mine.size));
  }
  return mine.memory;
}

}  // namespace llmx_pool
