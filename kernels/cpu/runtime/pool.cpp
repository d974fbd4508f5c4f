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
constexpr int64_t AHEAD = 192 * 1024;  // bytes that a thread asks for before a job: what its second-level cache can keep
constexpr int64_t LINE = 64, LINES = 8;  // asked for between two looks for a job

inline void relax() {
#if defined(__x86_64__)
  _mm_pause();
#endif
}

// A thread's tasks of a job, in one word: the job's number, the first task that nobody has claimed, and one past the last.
constexpr int TASK_BITS = 20;
constexpr int64_t MOST_TASKS = (int64_t{1} << TASK_BITS) - 1;
constexpr uint64_t ONE_FIRST = uint64_t{1} << TASK_BITS, ONE_LAST = 1;

inline uint32_t number_of(uint64_t word) { return static_cast<uint32_t>(word >> 2 * TASK_BITS); }
inline int64_t first_of(uint64_t word) { return static_cast<int64_t>(word >> TASK_BITS & MOST_TASKS); }
inline int64_t last_of(uint64_t word) { return static_cast<int64_t>(word & MOST_TASKS); }
inline uint64_t word_of(uint32_t number, int64_t first, int64_t last) {
  return static_cast<uint64_t>(number) << 2 * TASK_BITS | static_cast<uint64_t>(first) << TASK_BITS |
         static_cast<uint64_t>(last);
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
  alignas(64) std::atomic<uint64_t> tasks{0};  // what it has yet to do of a job
  Bed bed;
  Delay delay;
  std::atomic<bool> ready{false};  // its delay can be read
  // What it asks for while it waits: up to where it has, and where that ends.
  const uint8_t *announced = nullptr, *asked = nullptr, *last = nullptr;
  void* memory = nullptr;
  int64_t size = 0;
};

// One job at a time. Each thread begins with a range of its tasks of its own, which it goes through from the front: it
// reads memory as one stream, and nobody else touches that word. Then it takes from the ends of the others' ranges. Who
// comes late finds another job's number, or no task, and fails to claim. `run` and `context` are read after a claim, and
// not rewritten before the last claimed task is done.
struct Pool {
  std::mutex one;  // job at a time
  alignas(64) std::atomic<uint32_t> current{0};  // the job's number
  std::atomic<int> wanted{0};                   // threads that may help
  Task run = nullptr;
  void* context = nullptr;
  alignas(64) std::atomic<int64_t> done{0};
  std::thread::id caller;
  Crowd crowd;
  int helpers = 0;
  bool full = false;  // the system gives no more threads
  Member members[MOST];

  alignas(64) std::atomic<const uint8_t*> next{nullptr};  // what will be read, see `ahead`
  std::atomic<int64_t> next_bytes{0};
  std::atomic<bool> away{false};

  // Asks for a little of what will be read. False if there is nothing more.
  bool ask(int thread, int team) {
    Member& mine = members[thread];
    const uint8_t* at = next.load(std::memory_order_acquire);
    if (at != mine.announced) {
      mine.announced = mine.asked = mine.last = at;
      const bool others = away.load(std::memory_order_relaxed);  // share it
      if (at != nullptr && (thread > 0 || !others)) {
        const int64_t bytes = next_bytes.load(std::memory_order_relaxed);
        const int64_t part = others ? thread - 1 : thread, parts = others ? team - 1 : team;
        const int64_t from = bytes * part / parts / LINE * LINE, to = bytes * (part + 1) / parts;
        mine.asked += from, mine.last += others || to - from < AHEAD ? to : from + AHEAD;
      }
    }
    if (mine.asked >= mine.last) return false;
    for (int line = 0; line < LINES; ++line) __builtin_prefetch(mine.asked + LINE * line, 0, 2);
    mine.asked += LINES * LINE;
    return true;
  }

  int64_t work(uint32_t job, int thread, int team) {
    int64_t finished = 0;
    for (int turn = 0; turn < team; ++turn) {
      const bool own = turn == 0;
      std::atomic<uint64_t>& tasks = members[(thread + turn) % team].tasks;
      uint64_t seen = tasks.load(std::memory_order_acquire);
      while (number_of(seen) == job && first_of(seen) < last_of(seen)) {
        const int64_t task = own ? first_of(seen) : last_of(seen) - 1;
        const uint64_t left = own ? seen + ONE_FIRST : seen - ONE_LAST;
        if (!tasks.compare_exchange_weak(seen, left, std::memory_order_acq_rel, std::memory_order_acquire)) continue;
        run(context, task, thread);
        ++finished;
        seen = tasks.load(std::memory_order_acquire);
      }
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
    int team = 0;
    const auto called = [&] {  // `wanted` is read after the number: if it isn't that job's, the job is over
      job = current.load(std::memory_order_seq_cst);
      team = wanted.load(std::memory_order_seq_cst);
      return job != last && thread < team;
    };
    for (int spins = 1;; ++spins) {
      if (called()) {
        last = job;
        if (work(job, thread, team)) members[0].bed.wake();
        since = 0, spins = 0;
      } else if (team > thread && ask(thread, team)) {
        spins = 0;
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
        std::thread helper([this, thread] { serve(thread); });
        helper.detach();
        ++helpers;
      } catch (const std::system_error&) {
        full = true;
      }
    }
  }

  void share(Task task, void* with, int64_t tasks, int team) {
    const uint32_t number = number_of(word_of(current.load(std::memory_order_relaxed) + 1, 0, 0));  // wraps
    run = task, context = with;
    done.store(0, std::memory_order_relaxed);
    wanted.store(team, std::memory_order_seq_cst);
    for (int thread = 0; thread < team; ++thread)
      members[thread].tasks.store(word_of(number, tasks * thread / team, tasks * (thread + 1) / team),
                                  std::memory_order_release);
    current.store(number, std::memory_order_seq_cst);
    for (int thread = 1; thread < team; ++thread) members[thread].bed.wake();
    work(number, 0, team);
    wait(tasks, team);
  }

  // Until others have done the last tasks. After a while asleep: a thread that lost its core can then have this one.
  void wait(int64_t tasks, int team) {
    const auto finished = [&] { return done.load(std::memory_order_seq_cst) == tasks; };
    int64_t since = 0;
    for (int spins = 1; !finished(); ++spins) {
      if (ask(0, team)) continue;
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
std::atomic<Pool*> made{nullptr};
std::atomic_flag making = ATOMIC_FLAG_INIT;

// A forked child has none of its parent's threads.
void forget() {
  made.store(nullptr, std::memory_order_relaxed);
  making.clear(std::memory_order_relaxed);
}

Pool& pool() {
  Pool* found = made.load(std::memory_order_acquire);
  if (found != nullptr) return *found;
  while (making.test_and_set(std::memory_order_acquire)) std::this_thread::yield();
  found = made.load(std::memory_order_acquire);
  if (found == nullptr) {
    static const int watched = pthread_atfork(nullptr, nullptr, forget);
    (void)watched;
    found = new Pool;
    made.store(found, std::memory_order_release);
  }
  making.clear(std::memory_order_release);
  return *found;
}

// More tasks than fit into a word: some at a time.
struct Slice {
  Task run;
  void* context;
  int64_t first;
};

void run_slice(void* context, int64_t task, int thread) {
  const Slice& slice = *static_cast<const Slice*>(context);
  slice.run(slice.context, slice.first + task, thread);
}

}  // namespace

void each(Task run, void* context, int64_t tasks, int threads) {
  if (tasks > MOST_TASKS) {
    for (Slice slice{run, context, 0}; slice.first < tasks; slice.first += MOST_TASKS)
      each(run_slice, &slice, tasks - slice.first < MOST_TASKS ? tasks - slice.first : MOST_TASKS, threads);
    return;
  }
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

void ahead(const void* at, int64_t bytes, bool away) {
  Pool& p = pool();
  if (p.next.load(std::memory_order_relaxed) == at) return;  // waiting threads look at it all the time
  p.next_bytes.store(bytes, std::memory_order_relaxed);
  p.away.store(away, std::memory_order_relaxed);
  p.next.store(static_cast<const uint8_t*>(at), std::memory_order_release);
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
