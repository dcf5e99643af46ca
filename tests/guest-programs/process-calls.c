// SPDX-License-Identifier: Apache-2.0 OR MIT
/*
 * process-calls: calls of verbs and rdma_cm answer as those of a device with a kernel driver do,
 * with NICs for processes.
 *
 * Waiting: SIGSTOP and a signal whose handler has SA_RESTART do not end a wait for an event, one
 * without it does (signal(7)). Ending: who destroys an object waits until its events are
 * acknowledged (ibv_destroy_cq(3), ibv_get_async_event(3)), and no other object's event is lost.
 * Room: what a program makes and ends again costs nothing, whatever its size; a full table of
 * descriptors is EMFILE, and costs no more than that call. Returning: a device that was lost can be
 * had again, and a child of fork() has one of its own. Apart: descriptors that the program has
 * closed, and threads that it cancels.
 *
 * Each case is a process of its own: it prints "ok NAME", or "fail NAME: why", and exit status is 0
 * only if all were ok.
 *
 *     process-calls DEVICE [CASE]
 *
 * Build: gcc -O2 -Wall -Wextra -o process-calls process-calls.c -lrdmacm -libverbs -lpthread
 */
#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <infiniband/verbs.h>
#include <poll.h>
#include <pthread.h>
#include <rdma/rdma_cma.h>
#include <signal.h>
#include <stdarg.h>
#include <stdatomic.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/resource.h>
#include <sys/wait.h>
#include <unistd.h>

enum { WAIT_MS = 20000, A_WHILE_MS = 200 };

static const char *device;

__attribute__((format(printf, 1, 2), noreturn)) static void fail(const char *format, ...)
{
	char why[256];
	va_list args;

	va_start(args, format);
	vsnprintf(why, sizeof(why), format, args);
	va_end(args);
	fprintf(stderr, "%s\n", why);
	exit(1);
}

#define MUST(cond)                                                                                 \
	do {                                                                                       \
		if (!(cond))                                                                       \
			fail("line %d: %s (errno %d)", __LINE__, #cond, errno);                    \
	} while (0)

static struct ibv_context *open_device(void)
{
	struct ibv_device **list = ibv_get_device_list(NULL);
	struct ibv_context *context = NULL;

	for (int i = 0; list && list[i] && !context; i++)
		if (!strcmp(ibv_get_device_name(list[i]), device))
			context = ibv_open_device(list[i]);
	if (!context)
		fail("%s cannot be opened (errno %d)", device, errno);
	ibv_free_device_list(list);
	return context;
}

#include "process-descriptors.h"
#include "process-calls-waits.h"
#include "process-calls-ends.h"
#include "process-calls-room.h"
#include "process-calls-returns.h"
#include "process-calls-apart.h"

/* ---- Cases ----------------------------------------------------------------------------------- */

static const struct test {
	const char *name;
	void (*run)(void);
} cases[] = {
	{ "waits-cm", waits_cm },     { "waits-several", waits_several },
	{ "waits-cq", waits_cq },     { "waits-async", waits_async },
	{ "acks-cq", acks_cq },	      { "acks-async", acks_async },
	{ "others", others },	      { "large", large },
	{ "channels", channels },     { "full", full },
	{ "greedy", greedy },	      { "inlined", inlined },
	{ "children", children },     { "appears", appears },
	{ "closes-between", closes_between },
	{ "closes-under", closes_under },
	{ "closes-for-file", closes_for_file },
	{ "cancels", cancels },
};

static bool passes(const struct test *test)
{
	int status = 0;
	pid_t pid;

	fflush(stdout);
	pid = fork();
	if (!pid) {
		alarm(100);
		test->run();
		exit(0);
	}
	if (pid < 0 || waitpid(pid, &status, 0) != pid || status) {
		printf("fail %s (%#x)\n", test->name, status);
		return false;
	}
	printf("ok %s\n", test->name);
	return true;
}

int main(int argc, char **argv)
{
	static const struct test alone = { "returns", returns };
	bool good = true;

	if (argc != 2 && argc != 3) {
		fprintf(stderr, "usage: process-calls DEVICE [CASE]\n");
		return 2;
	}
	device = argv[1];
	/* Somebody has to end the device meanwhile. */
	if (argc == 3 && !strcmp(argv[2], alone.name))
		return !passes(&alone);
	for (size_t i = 0; i < sizeof(cases) / sizeof(cases[0]); i++) {
		if (argc == 2 || !strcmp(argv[2], cases[i].name))
			good = passes(&cases[i]) && good;
	}
	return !good;
}
