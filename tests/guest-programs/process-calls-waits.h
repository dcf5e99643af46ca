// SPDX-License-Identifier: Apache-2.0 OR MIT
/*
 * A part of process-calls.c: waits for events, and signals.
 */
/* Signals that the child has had. */
static atomic_int heard;

static void hear(int signal)
{
	(void)signal;
	heard++;
}

static void handle(int signal, int flags)
{
	struct sigaction action = { .sa_handler = hear, .sa_flags = flags };

	MUST(!sigaction(signal, &action, NULL));
}

/* What is waited for; nothing of it ever comes. */
enum wait { CM, CQ, ASYNC };

static int wait_for(enum wait what)
{
	struct ibv_context *context = what == CM ? NULL : open_device();
	struct rdma_event_channel *events = what == CM ? rdma_create_event_channel() : NULL;
	struct ibv_comp_channel *channel = what == CQ ? ibv_create_comp_channel(context) : NULL;
	struct rdma_cm_event *event;
	struct ibv_async_event happened;
	struct ibv_cq *cq;
	void *of;

	MUST(what != CM || events);
	MUST(what != CQ || channel);
	MUST(write(STDOUT_FILENO, "", 1) == 1);
	switch (what) {
	case CM:
		return rdma_get_cm_event(events, &event);
	case CQ:
		return ibv_get_cq_event(channel, &cq, &of);
	default:
		return ibv_get_async_event(context, &happened);
	}
}

static char state_of(pid_t pid)
{
	char path[64], state = 0;
	FILE *stat;

	snprintf(path, sizeof(path), "/proc/%d/stat", pid);
	stat = fopen(path, "r");
	if (stat) {
		(void)!fscanf(stat, "%*d (%*[^)]) %c", &state);
		fclose(stat);
	}
	return state;
}

/* Sleeping for longer than any call to the device takes. */
static bool sleeps(pid_t pid)
{
	int tries, asleep = 0;

	for (tries = 0; tries < WAIT_MS / 10 && asleep < A_WHILE_MS / 10; tries++) {
		char state = state_of(pid);

		if (!state || state == 'Z')
			return false;
		asleep = state == 'S' ? asleep + 1 : 0;
		usleep(10000);
	}
	return asleep >= A_WHILE_MS / 10;
}

static void reach(pid_t pid, char state)
{
	for (int tries = 0; state_of(pid) != state; tries++) {
		if (tries == WAIT_MS / 10)
			fail("the child is not %c but %c", state, state_of(pid));
		usleep(10000);
	}
}

/* `strict`: the child has a handler without SA_RESTART, for SIGUSR2. */
static void wait_through(enum wait what, bool strict)
{
	int ready[2], status;
	char byte;
	pid_t pid;

	MUST(!pipe(ready));
	pid = fork();
	MUST(pid >= 0);
	if (!pid) {
		dup2(ready[1], STDOUT_FILENO);
		handle(SIGUSR1, SA_RESTART);
		if (strict)
			handle(SIGUSR2, 0);
		errno = 0;
		status = wait_for(what);
		/* What it came back with, and how many signals before. */
		_exit(status == -1 && errno == EINTR ? 10 + heard : 1);
	}
	close(ready[1]);
	MUST(read(ready[0], &byte, 1) == 1);
	close(ready[0]);
	if (!sleeps(pid))
		fail("the child does not wait");
	kill(pid, SIGSTOP);
	reach(pid, 'T');
	kill(pid, SIGCONT);
	if (!sleeps(pid))
		fail("SIGSTOP and SIGCONT ended the wait");
	kill(pid, SIGUSR1);
	if (!sleeps(pid))
		fail("a signal with SA_RESTART ended the wait");
	if (strict) {
		kill(pid, SIGUSR2);
		reach(pid, 'Z');
	}
	kill(pid, SIGKILL);
	MUST(waitpid(pid, &status, 0) == pid);
	if (strict && (!WIFEXITED(status) || WEXITSTATUS(status) != 12))
		fail("a signal without SA_RESTART: %#x", status);
}

static void one_device(void)
{
	char *devices = getenv("VHOST_RDMA_DEVICES"), *end;

	if (devices && (end = strchr(devices, ':'))) {
		devices = strndup(devices, end - devices);
		MUST(devices && !setenv("VHOST_RDMA_DEVICES", devices, 1));
	}
}

/* Of one device: exactly as the kernel. Of several: if all handlers are alike. */
static void waits_cm(void)
{
	wait_through(CM, false);
	one_device();
	wait_through(CM, true);
}

/* A handler without SA_RESTART is heard among several devices too. */
static void waits_several(void)
{
	int status;
	pid_t pid = fork();

	MUST(pid >= 0);
	if (!pid) {
		struct rdma_event_channel *events = rdma_create_event_channel();
		struct rdma_cm_event *event;

		MUST(events);
		handle(SIGALRM, SA_RESETHAND);
		alarm(1);
		_exit(rdma_get_cm_event(events, &event) == -1 && errno == EINTR ? 10 + heard : 1);
	}
	MUST(waitpid(pid, &status, 0) == pid);
	if (!WIFEXITED(status) || WEXITSTATUS(status) != 11)
		fail("a handler for once: %#x", status);
}

static void waits_cq(void)
{
	wait_through(CQ, true);
}

static void waits_async(void)
{
	wait_through(ASYNC, true);
}
