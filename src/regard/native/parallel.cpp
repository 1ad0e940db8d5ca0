#include "parallel.h"

#include <thread>
#include <vector>

namespace {
ThreadTeam thread_team = nullptr;
}

extern "C" void set_thread_team(ThreadTeam team) { thread_team = team; }

void run_on_threads(void (*body)(void*), void* data, long threads) {
    if (thread_team) return thread_team(body, data, unsigned(threads), 0);
    std::vector<std::thread> others;
    for (long i = 1; i < threads; i++) others.emplace_back(body, data);
    body(data);
    for (std::thread& each : others) each.join();
}
