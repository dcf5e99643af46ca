/* SPDX-License-Identifier: Apache-2.0 OR MIT */
/*
 * process-private: limits of locked memory, children of fork(), and memory that goes while it is
 * used. What has to begin before anything is registered, or may end its program, is a program of
 * its own: this one, executed again.
 */
#include <dirent.h>
#include <signal.h>
#include <spawn.h>
#include <sys/resource.h>

extern char **environ;

/* Runs a case of this program with devices of its own: its process, or -1. */
static pid_t begin_alone(const char *name)
{
	char *args[] = { "process-private", NULL, NULL, (char *)name, NULL };
	pid_t pid;
	int i;

	for (i = 0; i < 2; i++)
		args[1 + i] = (char *)ibv_get_device_name(ends[i].ctx->device);
	return posix_spawn(&pid, "/proc/self/exe", NULL, NULL, args, environ) ? -1 : pid;
}

/* Nothing is pinned: memory is registered whatever the limit of locked memory is. */
static bool unlimited(void)
{
	static const rlim_t limits[] = { 65536, 0 };
	struct rlimit before, lower;
	bool ok = true;
	size_t i;

	TRY(!getrlimit(RLIMIT_MEMLOCK, &before));
	for (i = 0; ok && i < sizeof(limits) / sizeof(limits[0]); i++) {
		lower = (struct rlimit){ limits[i], before.rlim_max };
		TRY(!setrlimit(RLIMIT_MEMLOCK, &lower));
		/* Each is of more bytes than the limit has. */
		ok = (limits[i] || large()) && kinds() && in_mapping(&mappings[0]);
	}
	TRY(!setrlimit(RLIMIT_MEMLOCK, &before));
	return ok;
}

/* ---- Children -------------------------------------------------------------------------------- */

enum { BATCH = 24, PART = ROOM / BATCH };

/* A child writes all over what it has of its parent's memory; some of it may not be there. */
static int scribble(uint8_t *heap)
{
	memset(heap, 0x77, ROOM);
	memset(bss[0], 0x77, ROOM);
	memset(bss[1], 0x77, ROOM);
	return 9;
}

/*
 * Children come while requests are under way; each request brings the parent's bytes, and the
 * parent's memory has them.
 */
static bool brings_through_forks(uint8_t *near, uint8_t *far, uint8_t *heap)
{
	struct ibv_mr *near_mr = ibv_reg_mr(ends[0].pd, near, ROOM, ALL);
	struct ibv_mr *far_mr = ibv_reg_mr(ends[1].pd, far, ROOM, ALL);
	struct ibv_wc wc;
	int lap, i, status;
	pid_t pid;

	TRY(near_mr && far_mr);
	MUST(make(IBV_QPT_RC, false, false));
	for (lap = 0; lap < 20; lap++) {
		bool reads = lap % 2;

		fill(reads ? far : near, ROOM, (unsigned int)lap);
		memset(reads ? near : far, 0xee, ROOM);
		for (i = 0; i < BATCH; i++)
			MUST(post(reads ? IBV_WR_RDMA_READ : IBV_WR_RDMA_WRITE, IBV_SEND_SIGNALED,
				  sge(near + i * PART, PART, near_mr),
				  (struct remote){ far + i * PART, far_mr, 0, 0 }));
		pid = fork();
		if (!pid)
			_exit(scribble(heap));
		for (i = 0; i < BATCH; i++)
			MUST(done(&ends[0], &wc, IBV_WC_SUCCESS));
		TRY(!memcmp(near, far, BATCH * PART));
		TRY(waitpid(pid, &status, 0) == pid);
		/* What is registered need not be a child's at all (ibv_fork_init(3)). */
		TRY(WIFSIGNALED(status) ? WTERMSIG(status) == SIGSEGV : WEXITSTATUS(status) == 9);
		TRY(!memcmp(near, far, BATCH * PART));
	}
	TRY(!ibv_dereg_mr(near_mr) && !ibv_dereg_mr(far_mr));
	return true;
}

/* Executed again: ibv_fork_init() comes before the first registration. */
static bool forking(void)
{
	uint8_t *heap = malloc(2 * ROOM), *shared = of_memfd();

	TRY(heap && shared && !ibv_fork_init());
	MUST(brings_through_forks(bss[0], bss[1], heap));
	MUST(brings_through_forks(heap, heap + ROOM, heap));
	MUST(brings_through_forks(shared, shared + ROOM, heap));
	MUST(brings_through_forks(shared, bss[1], heap));
	free(heap);
	munmap(shared, 2 * ROOM);
	return true;
}

static bool fork_init(void)
{
	pid_t pid = begin_alone("forking");
	int status;

	TRY(pid > 0 && waitpid(pid, &status, 0) == pid);
	TRY(WIFEXITED(status) && !WEXITSTATUS(status));
	return true;
}

/* ---- Memory that goes while it is used ------------------------------------------------------- */

/* One lap: requests of all kinds from and to memory that is unmapped under them. */
static bool unmap_under(uint8_t *near, uint8_t *far, bool is_far)
{
	static const enum ibv_wr_opcode ops[] = {
		IBV_WR_RDMA_WRITE, IBV_WR_RDMA_READ, IBV_WR_ATOMIC_FETCH_AND_ADD,
	};
	struct ibv_mr *near_mr = ibv_reg_mr(ends[0].pd, near, ROOM, ALL);
	struct ibv_mr *far_mr = ibv_reg_mr(ends[1].pd, far, ROOM, ALL);
	struct ibv_wc wc;
	int i;

	TRY(near_mr && far_mr);
	MUST(make(IBV_QPT_RC, false, false));
	for (i = 0; i < BATCH; i++) {
		uint32_t len = i % 3 == 2 ? 8 : i % 2 ? 4096 : 8;

		MUST(post(ops[i % 3], IBV_SEND_SIGNALED, sge(near + 4096, len, near_mr),
			  (struct remote){ far + 4096, far_mr, 1, 0 }));
		if (i == BATCH / 2)
			TRY(!munmap(is_far ? far : near, ROOM));
		/* What is posted from memory that is gone ends the program, as documented. */
	}
	for (i = 0; i < BATCH; i++) {
		int status = next(&ends[0], &wc);

		TRY(status == IBV_WC_SUCCESS || status == IBV_WC_REM_OP_ERR ||
		    status == IBV_WC_WR_FLUSH_ERR);
	}
	TRY(!ibv_dereg_mr(near_mr) && !ibv_dereg_mr(far_mr));
	return true;
}

/* Executed again: a peer's memory goes, and then the program's own. */
static bool unmapping(void)
{
	int lap;

	for (lap = 0; lap < 40; lap++) {
		uint8_t *gone = map(ROOM, PROT_READ | PROT_WRITE);

		TRY(gone);
		MUST(unmap_under(bss[0], gone, true));
	}
	printf("far\n");
	fflush(stdout);
	for (lap = 0; lap < 4; lap++) {
		uint8_t *gone = map(ROOM, PROT_READ | PROT_WRITE);

		TRY(gone);
		MUST(unmap_under(gone, bss[1], false));
	}
	return true;
}

/* Of a file all goes on as if nothing had happened: the region is the file's. */
static bool unmap_files(void)
{
	int lap;

	if (says_private())
		return true;
	for (lap = 0; lap < 20; lap++) {
		uint8_t *gone[2] = { map_file(memory_file(ROOM), ROOM, MAP_SHARED, 0),
				     map_file(memory_file(ROOM), ROOM, MAP_SHARED, 0) };
		struct ibv_mr *mrs[2];
		struct ibv_wc wc;
		int i;

		TRY(gone[0] && gone[1]);
		TRY((mrs[0] = ibv_reg_mr(ends[0].pd, gone[0], ROOM, ALL)));
		TRY((mrs[1] = ibv_reg_mr(ends[1].pd, gone[1], ROOM, ALL)));
		MUST(make(IBV_QPT_RC, false, false));
		for (i = 0; i < BATCH; i++) {
			MUST(post(i % 2 ? IBV_WR_RDMA_READ : IBV_WR_RDMA_WRITE, IBV_SEND_SIGNALED,
				  sge(gone[0], ROOM, mrs[0]),
				  (struct remote){ gone[1], mrs[1], 0, 0 }));
			if (i == BATCH / 3)
				TRY(!munmap(gone[0], ROOM) && !munmap(gone[1], ROOM));
		}
		for (i = 0; i < BATCH; i++)
			MUST(done(&ends[0], &wc, IBV_WC_SUCCESS));
		TRY(!ibv_dereg_mr(mrs[0]) && !ibv_dereg_mr(mrs[1]));
	}
	return true;
}

/* What round trips took, in seconds: the first so many of them. */
enum { TRIPS = 1 << 16 };
static double trips[TRIPS];
static long trip_count;

static int by_length(const void *a, const void *b)
{
	const double *x = a, *y = b;

	return (*x > *y) - (*x < *y);
}

/* The longest of 99 of 100, and the longest of all. */
static double p99(double *longest)
{
	long counted = trip_count < TRIPS ? trip_count : TRIPS;

	qsort(trips, (size_t)counted, sizeof(trips[0]), by_length);
	*longest = trips[counted - 1];
	return trips[counted * 99 / 100];
}

/*
 * For how long threads of this program were ready to run and did not, in seconds: its own and the
 * library's (proc(5), schedstat). It is no wait for the device.
 */
static double kept(void)
{
	DIR *tasks = opendir("/proc/self/task");
	double all = 0;
	struct dirent *task;

	while (tasks && (task = readdir(tasks))) {
		unsigned long long ran, waited;
		char path[300];
		FILE *file;

		snprintf(path, sizeof(path), "/proc/self/task/%s/schedstat", task->d_name);
		file = fopen(path, "r");
		if (file && fscanf(file, "%llu %llu", &ran, &waited) == 2)
			all += (double)waited / 1e9;
		if (file)
			fclose(file);
	}
	if (tasks)
		closedir(tasks);
	return all;
}

/* One of them, and its bytes. */
static bool trip(struct ibv_mr *near_mr, struct ibv_mr *far_mr)
{
	struct remote there = { bss[1] + AT, far_mr, 0, 0 };
	double begin, before, took;

	fill(bss[0], ROOM, (unsigned int)trip_count);
	memset(bss[1], 0xee, ROOM);
	before = kept();
	begin = now();
	MUST(does(IBV_WR_RDMA_WRITE, sge(bss[0] + AT, LEN, near_mr), there, IBV_WC_SUCCESS));
	took = now() - begin;
	took -= took > 1e-3 ? kept() - before : 0;
	trips[trip_count++ % TRIPS] = took > 0 ? took : 0;
	MUST(moved(bss[0], bss[1]));
	return true;
}

/*
 * A program whose memory goes under its requests has statuses for them, or ends; round trips of
 * another program at the same NICs go on meanwhile. Of 100 the slowest but one takes at most twice
 * as long as alone, and 100 ms: the programs, their threads and the device have no cores of their
 * own here. What the device itself adds is a row of the isolation benchmark (process_unmaps).
 */
static bool bystander(void)
{
	struct ibv_mr *near_mr = ibv_reg_mr(ends[0].pd, bss[0], ROOM, ALL);
	struct ibv_mr *far_mr = ibv_reg_mr(ends[1].pd, bss[1], ROOM, ALL);
	double alone, beside, longest;
	int status, lap;

	TRY(near_mr && far_mr);
	MUST(make(IBV_QPT_RC, false, false));
	for (trip_count = 0; trip_count < 500;)
		MUST(trip(near_mr, far_mr));
	alone = p99(&longest);
	trip_count = 0;
	for (lap = 0; lap < 3; lap++) {
		pid_t pid = begin_alone("unmapping");

		TRY(pid > 0);
		while (!waitpid(pid, &status, WNOHANG))
			MUST(trip(near_mr, far_mr));
		TRY(WIFSIGNALED(status) ? WTERMSIG(status) == SIGSEGV : !WEXITSTATUS(status));
	}
	TRY(trip_count > 100);
	beside = p99(&longest);
	printf("# %ld round trips, 99 of 100 in %.2f ms, alone in %.2f ms, the slowest %.1f ms\n",
	       trip_count, beside * 1e3, alone * 1e3, longest * 1e3);
	/* Who waited for it would wait for a timeout, or for ever. */
	TRY(beside <= 2 * alone + 0.1 && longest < 0.5);
	TRY(!ibv_dereg_mr(near_mr) && !ibv_dereg_mr(far_mr));
	return true;
}
