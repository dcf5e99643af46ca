// SPDX-License-Identifier: Apache-2.0 OR MIT
/*
 * vrdma-life: a program with posted work to whom something happens.
 *
 *     vrdma-life poll    posts work that nothing completes, then only polls
 *     vrdma-life sleep   the same, then sleeps in ibv_get_cq_event; both end with 0 when everything
 *                        outstanding came back as WR_FLUSH_ERR, a new post fails, and the event
 *                        came
 *     vrdma-life busy    writes and compares without end, and ends as `poll` does
 *     vrdma-life fork    children of a process with posted work: they have no doorbell, the
 *                        parent's work goes on
 *     vrdma-life exec    posts work and becomes another program
 *     vrdma-life pin     registers memory whose first page comes when /tmp/let-go exists; the
 *                        device must be lost by then
 *     vrdma-life memory  -p PFN: a region with pages from frame PFN on (root): written by the
 *                        device and compared; with -s seconds: again and again
 *
 * "holding" is printed when there is something to lose; then one JSON line says what came of it.
 * Work is posted between two QPs of one device, so that no peer is needed: a SEND without a receive
 * waits in its queue (infinite RNR retries), receives wait in the other.
 *
 * Build: gcc -O2 -Wall -Wextra -o vrdma-life vrdma-life.c -libverbs -lpthread
 */
#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <infiniband/verbs.h>
#include <linux/userfaultfd.h>
#include <poll.h>
#include <pthread.h>
#include <sched.h>
#include <signal.h>
#include <stdbool.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/ioctl.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

enum { DEPTH = 16, RECEIVES = 8, PAGE = 4096, PATIENCE_S = 120 };

static struct {
	struct ibv_context *ctx;
	struct ibv_pd *pd;
	struct ibv_mr *mr;
	struct ibv_comp_channel *channel;
	struct ibv_cq *cq;
	struct ibv_qp *a, *b;
	union ibv_gid gid;
	unsigned char *memory;
	size_t half;		/* the first half is written to the second */
	int gid_index;
} me = { .gid_index = 1 };

static double now(void)
{
	struct timespec t;

	clock_gettime(CLOCK_MONOTONIC, &t);
	return (double)t.tv_sec + (double)t.tv_nsec * 1e-9;
}

#define CHECK(condition)                                                                      \
	do {                                                                                  \
		if (!(condition)) {                                                           \
			printf("{\"ok\":false,\"error\":\"%s, line %d: %s (%s)\"}\n", __func__, \
			       __LINE__, #condition, strerror(errno));                        \
			exit(1);                                                              \
		}                                                                             \
	} while (0)

/* ---- Verbs ----------------------------------------------------------------------------------- */

static void open_device(const char *name, size_t bytes)
{
	struct ibv_device **list = ibv_get_device_list(NULL);
	int i;

	for (i = 0; list && list[i] && !me.ctx; i++)
		if (!name || !strcmp(name, ibv_get_device_name(list[i])))
			me.ctx = ibv_open_device(list[i]);
	CHECK(me.ctx);
	ibv_free_device_list(list);
	me.pd = ibv_alloc_pd(me.ctx);
	CHECK(me.pd && !ibv_query_gid(me.ctx, 1, me.gid_index, &me.gid));
	me.half = bytes / 2;
	me.memory = mmap(NULL, bytes, PROT_READ | PROT_WRITE,
			 MAP_PRIVATE | MAP_ANONYMOUS | MAP_POPULATE, -1, 0);
	CHECK(me.memory != MAP_FAILED);
	me.mr = ibv_reg_mr(me.pd, me.memory, bytes,
			   IBV_ACCESS_LOCAL_WRITE | IBV_ACCESS_REMOTE_WRITE);
	CHECK(me.mr);
	me.channel = ibv_create_comp_channel(me.ctx);
	CHECK(me.channel);
	me.cq = ibv_create_cq(me.ctx, DEPTH * 4, NULL, me.channel, 0);
	CHECK(me.cq);
}

static struct ibv_qp *make_qp(void)
{
	struct ibv_qp_init_attr init = {
		.send_cq = me.cq,
		.recv_cq = me.cq,
		.qp_type = IBV_QPT_RC,
		.cap = { .max_send_wr = DEPTH, .max_recv_wr = DEPTH, .max_send_sge = 1,
			 .max_recv_sge = 1 },
	};
	struct ibv_qp *qp = ibv_create_qp(me.pd, &init);

	CHECK(qp);
	return qp;
}

static void connect_qp(struct ibv_qp *qp, uint32_t peer)
{
	struct ibv_qp_attr attr = { .qp_state = IBV_QPS_INIT, .port_num = 1,
				    .qp_access_flags = IBV_ACCESS_REMOTE_WRITE };

	CHECK(!ibv_modify_qp(qp, &attr, IBV_QP_STATE | IBV_QP_PKEY_INDEX | IBV_QP_PORT |
			     IBV_QP_ACCESS_FLAGS));
	attr = (struct ibv_qp_attr){
		.qp_state = IBV_QPS_RTR,
		.path_mtu = IBV_MTU_1024,
		.dest_qp_num = peer,
		.min_rnr_timer = 14,
		.ah_attr = { .is_global = 1, .port_num = 1,
			     .grh = { .dgid = me.gid, .sgid_index = (uint8_t)me.gid_index,
				      .hop_limit = 1 } },
	};
	CHECK(!ibv_modify_qp(qp, &attr, IBV_QP_STATE | IBV_QP_AV | IBV_QP_PATH_MTU |
			     IBV_QP_DEST_QPN | IBV_QP_RQ_PSN | IBV_QP_MAX_DEST_RD_ATOMIC |
			     IBV_QP_MIN_RNR_TIMER));
	/*
	 * 7 RNR retries are without end (IBTA 9.7.5.2.8): a SEND waits for its receive as long as
	 * the device lives.
	 */
	attr = (struct ibv_qp_attr){ .qp_state = IBV_QPS_RTS, .timeout = 18, .retry_cnt = 7,
				     .rnr_retry = 7 };
	CHECK(!ibv_modify_qp(qp, &attr, IBV_QP_STATE | IBV_QP_TIMEOUT | IBV_QP_RETRY_CNT |
			     IBV_QP_RNR_RETRY | IBV_QP_SQ_PSN | IBV_QP_MAX_QP_RD_ATOMIC));
}

static int post_receive(struct ibv_qp *qp, uint64_t id)
{
	struct ibv_sge sge = { .addr = (uintptr_t)me.memory + me.half, .length = PAGE,
			       .lkey = me.mr->lkey };
	struct ibv_recv_wr *bad, wr = { .wr_id = id, .sg_list = &sge, .num_sge = 1 };

	return ibv_post_recv(qp, &wr, &bad);
}

static int post(struct ibv_qp *qp, enum ibv_wr_opcode opcode, uint64_t id, uint32_t len)
{
	struct ibv_sge sge = { .addr = (uintptr_t)me.memory, .length = len, .lkey = me.mr->lkey };
	struct ibv_send_wr *bad, wr = { .wr_id = id, .sg_list = &sge, .num_sge = 1,
					.opcode = opcode, .send_flags = IBV_SEND_SIGNALED };

	wr.wr.rdma.remote_addr = (uintptr_t)me.memory + me.half;
	wr.wr.rdma.rkey = me.mr->rkey;
	return ibv_post_send(qp, &wr, &bad);
}

/* The next completion; only polling. */
static struct ibv_wc next(void)
{
	double end = now() + PATIENCE_S;
	struct ibv_wc wc;
	int got;

	while (!(got = ibv_poll_cq(me.cq, 1, &wc))) {
		CHECK(now() < end);
		sched_yield();
	}
	CHECK(got == 1);
	return wc;
}

static void connect_pair(void)
{
	me.a = make_qp();
	me.b = make_qp();
	connect_qp(me.a, me.b->qp_num);
	connect_qp(me.b, me.a->qp_num);
}

/* One SEND and RECEIVES receives that nothing completes; returns how many that are. */
static int post_for_ever(void)
{
	int i;

	for (i = 0; i < RECEIVES; i++)
		CHECK(!post_receive(me.a, 100 + i));
	CHECK(!post(me.a, IBV_WR_SEND, 1, 64));
	return RECEIVES + 1;
}

/* ---- Losing the device ----------------------------------------------------------------------- */

/* Does DEVICE_FATAL come, within a while? */
static bool fatal_event(void)
{
	struct pollfd fd = { .fd = me.ctx->async_fd, .events = POLLIN };
	struct ibv_async_event event;

	while (poll(&fd, 1, 10000) == 1) {
		if (ibv_get_async_event(me.ctx, &event))
			return false;
		ibv_ack_async_event(&event);
		if (event.event_type == IBV_EVENT_DEVICE_FATAL)
			return true;
	}
	return false;
}

/*
 * `wc` and what else is outstanding come back flushed, nothing else does, and nothing new is taken.
 */
static void all_flushed(struct ibv_wc wc, int outstanding, double held)
{
	int left = outstanding;
	struct ibv_wc more;

	while (left) {
		CHECK(wc.status == IBV_WC_WR_FLUSH_ERR);
		if (--left)
			wc = next();
	}
	CHECK(!ibv_poll_cq(me.cq, 1, &more));
	CHECK(post_receive(me.a, 5) && post(me.a, IBV_WR_SEND, 6, 8));
	held = now() - held;
	CHECK(fatal_event());
	/*
	 * The device is gone, and with it the objects; that they can be given back, one by one, is
	 * the point.
	 */
	ibv_destroy_qp(me.a);
	ibv_destroy_qp(me.b);
	ibv_destroy_cq(me.cq);
	ibv_destroy_comp_channel(me.channel);
	ibv_dereg_mr(me.mr);
	ibv_dealloc_pd(me.pd);
	ibv_close_device(me.ctx);
	printf("{\"ok\":true,\"flushed\":%d,\"held\":%.1f}\n", outstanding, held);
}

static void hold_polling(void)
{
	int n = post_for_ever();
	double start = now();

	puts("holding");
	all_flushed(next(), n, start);
}

static void hold_sleeping(void)
{
	int n = post_for_ever();
	double start = now();
	struct ibv_cq *cq;
	void *context;

	CHECK(!ibv_req_notify_cq(me.cq, 0));
	puts("holding");
	/* An event, or an error because the device is taken away: both wake. */
	if (!ibv_get_cq_event(me.channel, &cq, &context))
		ibv_ack_cq_events(cq, 1);
	all_flushed(next(), n, start);
}

static void hold_busy(void)
{
	int n = post_for_ever();
	double start = now();
	uint64_t rounds = 0;
	struct ibv_wc wc;

	/* The SEND in front would block the queue of a: b writes. */
	for (;;) {
		memset(me.memory, (int)++rounds, PAGE);
		/* A post may be refused because the device went between two of them. */
		if (post(me.b, IBV_WR_RDMA_WRITE, rounds, PAGE)) {
			wc = next();
			break;
		}
		wc = next();
		if (wc.status != IBV_WC_SUCCESS) {
			n++;
			break;
		}
		CHECK(wc.wr_id == rounds && !memcmp(me.memory, me.memory + me.half, PAGE));
		if (rounds == 100)
			puts("holding");
	}
	CHECK(rounds > 100);
	all_flushed(wc, n, start);
}

/* ---- fork, exec ------------------------------------------------------------------------------ */

/* The first address that is mapped from the device, or 0. */
static uintptr_t device_mapping(void)
{
	FILE *maps = fopen("/proc/self/maps", "r");
	unsigned long start, found = 0;
	char line[512];

	CHECK(maps);
	while (!found && fgets(line, sizeof(line), maps))
		if (strstr(line, "uverbs") && sscanf(line, "%lx-", &start) == 1)
			found = start;
	fclose(maps);
	return found;
}

static void no_memory_there(int signal)
{
	(void)signal;
	_exit(0);
}

/*
 * In the child: nothing of the device is mapped, and a store where the parent has a doorbell is a
 * SIGSEGV of the child alone.
 */
static void child(uintptr_t parents)
{
	if (device_mapping())
		_exit(2);
	signal(SIGSEGV, no_memory_there);
	*(volatile uint32_t *)parents = 1;
	_exit(3);
}

static void forks(void)
{
	uintptr_t mapping = device_mapping();
	int i, n, status;
	pid_t pid;

	CHECK(mapping);
	n = post_for_ever();
	for (i = 0; i < 20; i++) {
		pid = fork();
		if (!pid)
			child(mapping);
		memset(me.memory, i + 1, PAGE);
		CHECK(!post(me.b, IBV_WR_RDMA_WRITE, i, PAGE));
		CHECK(next().status == IBV_WC_SUCCESS &&
		      !memcmp(me.memory, me.memory + me.half, PAGE));
		CHECK(waitpid(pid, &status, 0) == pid && !status);
	}
	/*
	 * The SEND that waited through all of this finds its receive, and nothing else completes.
	 */
	CHECK(!post_receive(me.b, 50));
	for (i = 0; i < 2; i++)
		CHECK(next().status == IBV_WC_SUCCESS);
	CHECK(!ibv_destroy_qp(me.a) && !ibv_destroy_qp(me.b));
	printf("{\"ok\":true,\"children\":20,\"waited\":%d}\n", n);
}

static void execs(void)
{
	post_for_ever();
	puts("holding");
	execl("/bin/sleep", "sleep", "600", (char *)NULL);
	CHECK(!"exec");
}

/* ---- A registration that lasts --------------------------------------------------------------- */

static struct {
	int fd;
	unsigned char *page;
} missing;

static void *give_page(void *unused)
{
	struct uffdio_zeropage zero = { .range = { .start = (uintptr_t)missing.page,
						   .len = PAGE } };

	(void)unused;
	while (access("/tmp/let-go", F_OK))
		usleep(20000);
	CHECK(!ioctl(missing.fd, UFFDIO_ZEROPAGE, &zero));
	return NULL;
}

/*
 * The kernel pins the page inside of the call, and waits there for who gives it (userfaultfd(2)).
 */
static void pin(void)
{
	struct uffdio_api api = { .api = UFFD_API };
	struct uffdio_register range = { .mode = UFFDIO_REGISTER_MODE_MISSING };
	pthread_t giver;

	unlink("/tmp/let-go");
	missing.fd = (int)syscall(SYS_userfaultfd, O_CLOEXEC);
	missing.page = mmap(NULL, PAGE, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
	CHECK(missing.fd >= 0 && missing.page != MAP_FAILED &&
	      !ioctl(missing.fd, UFFDIO_API, &api));
	range.range.start = (uintptr_t)missing.page;
	range.range.len = PAGE;
	CHECK(!ioctl(missing.fd, UFFDIO_REGISTER, &range));
	CHECK(!pthread_create(&giver, NULL, give_page, NULL));
	puts("holding");
	CHECK(!ibv_reg_mr(me.pd, missing.page, PAGE, IBV_ACCESS_LOCAL_WRITE));
	CHECK(!pthread_join(giver, NULL));
	printf("{\"ok\":true}\n");
}

/* ---- Memory at a place ----------------------------------------------------------------------- */

/* Pages of the region at or above frame `pfn` (Documentation/admin-guide/mm/pagemap.rst). */
static uint64_t pages_from(uint64_t pfn)
{
	int fd = open("/proc/self/pagemap", O_RDONLY);
	uint64_t entry, found = 0;
	size_t i;

	CHECK(fd >= 0);
	for (i = 0; i < 2 * me.half / PAGE; i++) {
		off_t at = (off_t)(((uintptr_t)me.memory / PAGE + i) * sizeof(entry));

		CHECK(pread(fd, &entry, sizeof(entry), at) == sizeof(entry) && entry >> 63);
		found += (entry & ((1ull << 55) - 1)) >= pfn;
	}
	close(fd);
	return found;
}

static void memory(uint64_t pfn, double seconds)
{
	double end = now() + seconds;
	uint64_t pages = pages_from(pfn), rounds = 0;
	size_t i;

	CHECK(pages);
	do {
		for (i = 0; i < me.half; i++)
			me.memory[i] = (unsigned char)(i * 31 + i / PAGE + rounds);
		CHECK(!post(me.a, IBV_WR_RDMA_WRITE, rounds, (uint32_t)me.half));
		CHECK(next().status == IBV_WC_SUCCESS &&
		      !memcmp(me.memory, me.memory + me.half, me.half));
		if (!rounds++)
			puts("holding");
	} while (now() < end);
	printf("{\"ok\":true,\"pages\":%llu,\"rounds\":%llu}\n", (unsigned long long)pages,
	       (unsigned long long)rounds);
}

int main(int argc, char **argv)
{
	const char *name = NULL, *mode;
	double seconds = 0;
	uint64_t pfn = 0;
	int c;

	while ((c = getopt(argc, argv, "d:g:p:s:")) != -1) {
		switch (c) {
		case 'd': name = optarg; break;
		case 'g': me.gid_index = atoi(optarg); break;
		case 'p': pfn = strtoull(optarg, NULL, 0); break;
		case 's': seconds = atof(optarg); break;
		default: return 2;
		}
	}
	mode = optind < argc ? argv[optind] : "";
	setlinebuf(stdout);
	if (!strcmp(mode, "fork"))
		CHECK(!ibv_fork_init());
	open_device(name, strcmp(mode, "memory") ? 16 * PAGE : 16 << 20);
	connect_pair();
	if (!strcmp(mode, "poll"))
		hold_polling();
	else if (!strcmp(mode, "sleep"))
		hold_sleeping();
	else if (!strcmp(mode, "busy"))
		hold_busy();
	else if (!strcmp(mode, "fork"))
		forks();
	else if (!strcmp(mode, "exec"))
		execs();
	else if (!strcmp(mode, "pin"))
		pin();
	else if (!strcmp(mode, "memory"))
		memory(pfn, seconds);
	else
		fprintf(stderr,
			"usage: vrdma-life [-d device] [-g gid-index] "
			"poll|sleep|busy|fork|exec|pin|memory [-p PFN] [-s seconds]\n");
	return 0;
}
