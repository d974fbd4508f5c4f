// Drives the work queue as nothing sane would, to be run under the thread sanitizer; says what went wrong, else "ok".
//
// With DRIVE_KERNELS it runs kernels, too, which must give the same bits with any number of threads.
#include "runtime/pool.h"

#include <stdio.h>
#include <stdlib.h>
#include <sys/wait.h>
#include <unistd.h>

#include <atomic>
#include <chrono>
#include <cstring>
#include <thread>
#include <vector>

#if defined(DRIVE_KERNELS)
#include "ops.h"
#endif

namespace {

#define CHECK(condition) \
  do { \
    if (!(condition)) { \
      fprintf(stderr, "%s:%d: not so: %s\n", __FILE__, __LINE__, #condition); \
      _exit(1); \
    } \
  } while (0)

struct Count {
  std::vector<int> times;    // each task writes its own: a task that runs twice at once is a race
  std::vector<int64_t> sum;  // of each thread
  int threads;
  int work;
};

void count(void* context, int64_t task, int thread) {
  Count& c = *static_cast<Count*>(context);
  CHECK(thread >= 0 && thread < c.threads);
  int64_t* own = static_cast<int64_t*>(llmx_pool::scratch(thread, 64 * (1 + task % 3)));
  for (int i = 0; i < 8; ++i) own[i] = task;
  for (volatile int i = 0; i < c.work; i = i + 1) {
  }
  for (int i = 0; i < 8; ++i) CHECK(own[i] == task);
  ++c.times[static_cast<size_t>(task)];
  c.sum[static_cast<size_t>(thread)] += task;
}

void job(int64_t tasks, int threads, int work = 0) {
  Count c{std::vector<int>(static_cast<size_t>(tasks)), std::vector<int64_t>(static_cast<size_t>(threads)), threads, work};
  llmx_pool::ahead(tasks % 3 == 0 ? nullptr : &c, tasks * 1000, tasks % 2 == 0);  // never read, so it may be any memory
  llmx_pool::each(count, &c, tasks, threads);
  int64_t sum = 0;
  for (const int64_t part : c.sum) sum += part;
  CHECK(sum == tasks * (tasks - 1) / 2);
  for (const int times : c.times) CHECK(times == 1);
}

void tiny_jobs(int jobs) {
  for (int i = 0; i < jobs; ++i) job(i % 17, 1 + i % 5);
}

void more_threads_than_cores(int jobs) {
  for (int i = 0; i < jobs; ++i) job(1 + i % 200, 2 + i % 63, i % 300);
}

// Longer than threads spin, so that they sleep before the next job, and callers sleep before the last task.
void sleepy_jobs(int jobs) {
  for (int i = 0; i < jobs; ++i) {
    std::this_thread::sleep_for(std::chrono::microseconds(i % 3 * 200));
    job(2 + i % 3, 2 + i % 3, i % 2 * 100000);
  }
}

void several_callers(int callers, int jobs) {
  std::vector<std::thread> threads;
  for (int t = 0; t < callers; ++t) threads.emplace_back([=] { tiny_jobs(jobs), sleepy_jobs(jobs / 20); });
  for (auto& thread : threads) thread.join();
}

void in_a_forked_child(int jobs) {
  job(100, 4);
  const pid_t child = fork();
  CHECK(child >= 0);
  if (child == 0) {
    tiny_jobs(jobs);
    _exit(0);
  }
  tiny_jobs(jobs);
  int status = 0;
  CHECK(waitpid(child, &status, 0) == child);
  CHECK(WIFEXITED(status) && WEXITSTATUS(status) == 0);
}

#if defined(DRIVE_KERNELS)

std::vector<float> numbers(size_t n, uint32_t seed) {
  std::vector<float> made(n);
  for (float& x : made) seed = seed * 1664525u + 1013904223u, x = static_cast<float>(seed >> 8) * 0x1p-23f - 1.0f;
  return made;
}

std::vector<float> product(int64_t rows, int threads) {
  constexpr int64_t N_IN = 100, N_OUT = 333, BLOCKS = (N_OUT + 15) / 16;
  const auto x = numbers(static_cast<size_t>(rows * N_IN), 1), packed = numbers(BLOCKS * 16 * N_IN, 2);
  std::vector<float> out(static_cast<size_t>(rows * N_OUT));
  LLMX_ISA::linear_packed(out.data(), N_OUT, x.data(), rows, N_IN, reinterpret_cast<const uint8_t*>(packed.data()),
                          N_IN * 64, N_OUT, 0, nullptr, threads);
  return out;
}

std::vector<float> attended(int64_t tokens, int threads) {
  constexpr int64_t HEADS = 6, KV = 2, DIM = 24, SIZE = 16, BLOCKS = 8, SLOTS = BLOCKS * SIZE;
  const auto q = numbers(static_cast<size_t>(tokens * HEADS * DIM), 3);
  const auto keys = numbers(KV * SLOTS * DIM, 4), values = numbers(KV * SLOTS * DIM, 5);
  std::vector<int64_t> units, prefix, table(BLOCKS);
  for (int64_t t = 0; t < tokens; ++t) units.insert(units.end(), {t, 1, 0}), prefix.push_back(t + 1);
  for (int64_t b = 0; b < BLOCKS; ++b) table[static_cast<size_t>(b)] = BLOCKS - 1 - b;
  const int64_t base = 0;
  std::vector<float> out(q.size());
  const auto bytes = [](const std::vector<float>& x) { return reinterpret_cast<const uint8_t*>(x.data()); };
  LLMX_ISA::attention(out.data(), q.data(), bytes(keys), bytes(values), nullptr, HEADS, KV, DIM, SIZE * DIM * 4,
                      SLOTS * DIM * 4, 0, units.data(), tokens, prefix.data(), table.data(), BLOCKS, SIZE, &base,
                      nullptr, 0, nullptr, 0.2f, 0.0f, 0, 0, threads);
  return out;
}

void kernels() {
  for (const int64_t rows : {1, 3, 40}) {
    const auto one = product(rows, 1), all = attended(rows, 1);
    for (const int threads : {2, 3, 7}) {
      CHECK(product(rows, threads) == one);
      CHECK(attended(rows, threads) == all);
    }
  }
}

void kernels_from_several_callers() {
  std::vector<std::thread> threads;
  for (int t = 0; t < 3; ++t) threads.emplace_back(kernels);
  for (auto& thread : threads) thread.join();
}

#endif

}  // namespace

// Its argument: how many jobs; the default is for a machine with time to spare.
int main(int count, char** arguments) {
  const int jobs = count > 1 ? atoi(arguments[1]) : 20000;
  tiny_jobs(jobs);
  more_threads_than_cores(jobs / 20);
  sleepy_jobs(jobs / 20);
  several_callers(4, jobs / 4);
  in_a_forked_child(jobs / 20);
  job((1 << 21) + 5, 3);  // more than the words of the queue can count
#if defined(DRIVE_KERNELS)
  kernels();
  kernels_from_several_callers();
#endif
  puts("ok");
  return 0;
}
