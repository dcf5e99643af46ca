// SPDX-License-Identifier: Apache-2.0 OR MIT
/*
 * process-private: memory that a process has not shared, registered and used with NICs for
 * processes (docs/virtio-rdma-process.md). Nothing here is ours but the devices: it is what any
 * program does.
 *
 * Two devices, each with a context, talk to each other. A case makes its own QPs and prints "ok
 * NAME" or "fail NAME: why"; exit status 0 only if all were ok. Adjacent bytes are looked at
 * wherever bytes move. With --bandwidth: bytes per second of 64 KiB writes from and to this memory,
 * from and to malloc's and a memfd, and of memcpy.
 *
 *     process-private DEVICE DEVICE [CASE | --bandwidth]
 *
 * Build: gcc -O2 -Wall -Wextra -o process-private process-private.c -libverbs -lpthread
 */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <infiniband/verbs.h>
#include <linux/userfaultfd.h>
#include <pthread.h>
#include <stdarg.h>
#include <stdbool.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/ioctl.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <sys/syscall.h>
#include <sys/un.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

enum {
	WAIT_MS = 15000,
	DEPTH = 64,
	ALL = IBV_ACCESS_LOCAL_WRITE | IBV_ACCESS_REMOTE_READ | IBV_ACCESS_REMOTE_WRITE |
	      IBV_ACCESS_REMOTE_ATOMIC,
	BINDS = ALL | IBV_ACCESS_MW_BIND,
};

/* One end: a context, and one QP with what it needs. */
struct end {
	struct ibv_context *ctx;
	struct ibv_pd *pd;
	union ibv_gid gid;
	struct ibv_cq *cq;
	struct ibv_cq_ex *cq_ex;
	struct ibv_srq *srq;
	struct ibv_qp *qp;
};

static struct end ends[2];
static char why[256];

static bool fail(const char *fmt, ...)
{
	va_list args;

	va_start(args, fmt);
	vsnprintf(why, sizeof(why), fmt, args);
	va_end(args);
	return false;
}

#define TRY(cond)                                                                                  \
	do {                                                                                       \
		if (!(cond))                                                                       \
			return fail("line %d: %s (errno %d)", __LINE__, #cond, errno);             \
	} while (0)
/* What has said why already. */
#define MUST(done)                                                                                 \
	do {                                                                                       \
		if (!(done))                                                                       \
			return false;                                                              \
	} while (0)

static double now(void)
{
	struct timespec ts;

	clock_gettime(CLOCK_MONOTONIC, &ts);
	return (double)ts.tv_sec + (double)ts.tv_nsec / 1e9;
}

/* ---- Ends ------------------------------------------------------------------------------------ */

static bool make_qp(struct end *e, enum ibv_qp_type type, bool srq, bool extended)
{
	struct ibv_srq_init_attr sattr = { .attr = { .max_wr = 8, .max_sge = 2 } };
	struct ibv_cq_init_attr_ex cattr = { .cqe = 2 * DEPTH,
					     .wc_flags = IBV_WC_EX_WITH_BYTE_LEN };
	struct ibv_qp_init_attr_ex attr = {
		.cap = { DEPTH, DEPTH, 3, 3, 64 },
		.qp_type = type,
		.comp_mask = IBV_QP_INIT_ATTR_PD,
		.pd = e->pd,
	};

	e->cq_ex = extended ? ibv_create_cq_ex(e->ctx, &cattr) : NULL;
	e->cq = extended ? ibv_cq_ex_to_cq(e->cq_ex) : ibv_create_cq(e->ctx, 2 * DEPTH, NULL, NULL,
								     0);
	TRY(e->cq);
	e->srq = srq ? ibv_create_srq(e->pd, &sattr) : NULL;
	TRY(e->srq || !srq);
	attr.send_cq = attr.recv_cq = e->cq;
	attr.srq = e->srq;
	if (extended) {
		attr.comp_mask |= IBV_QP_INIT_ATTR_SEND_OPS_FLAGS;
		attr.send_ops_flags = IBV_QP_EX_WITH_SEND | IBV_QP_EX_WITH_RDMA_WRITE |
				      IBV_QP_EX_WITH_RDMA_READ |
				      IBV_QP_EX_WITH_ATOMIC_FETCH_AND_ADD;
	}
	TRY((e->qp = ibv_create_qp_ex(e->ctx, &attr)));
	return true;
}

static bool connect_qp(struct end *e, const struct end *peer)
{
	struct ibv_qp_attr a = { .qp_state = IBV_QPS_INIT, .port_num = 1, .qp_access_flags = ALL,
				 .qkey = 7 };
	bool ud = e->qp->qp_type == IBV_QPT_UD;

	TRY(!ibv_modify_qp(e->qp, &a, IBV_QP_STATE | IBV_QP_PKEY_INDEX | IBV_QP_PORT |
			   (ud ? IBV_QP_QKEY : IBV_QP_ACCESS_FLAGS)));
	a.qp_state = IBV_QPS_RTR;
	a.path_mtu = IBV_MTU_4096;
	a.dest_qp_num = peer->qp->qp_num;
	a.max_dest_rd_atomic = a.max_rd_atomic = 16;
	a.ah_attr.is_global = 1;
	a.ah_attr.port_num = 1;
	a.ah_attr.grh.dgid = peer->gid;
	TRY(!ibv_modify_qp(e->qp, &a, IBV_QP_STATE | (ud ? 0 : IBV_QP_AV | IBV_QP_PATH_MTU |
			   IBV_QP_DEST_QPN | IBV_QP_RQ_PSN | IBV_QP_MAX_DEST_RD_ATOMIC |
			   IBV_QP_MIN_RNR_TIMER)));
	a.qp_state = IBV_QPS_RTS;
	a.timeout = 14;
	a.retry_cnt = a.rnr_retry = 7;
	TRY(!ibv_modify_qp(e->qp, &a, IBV_QP_STATE | IBV_QP_SQ_PSN | (ud ? 0 : IBV_QP_TIMEOUT |
			   IBV_QP_RETRY_CNT | IBV_QP_RNR_RETRY | IBV_QP_MAX_QP_RD_ATOMIC)));
	return true;
}

static void drop(void)
{
	int i;

	for (i = 0; i < 2; i++) {
		struct end *e = &ends[i];

		if (e->qp)
			ibv_destroy_qp(e->qp);
		if (e->srq)
			ibv_destroy_srq(e->srq);
		if (e->cq)
			ibv_destroy_cq(e->cq);
		e->qp = NULL;
		e->srq = NULL;
		e->cq = NULL;
		e->cq_ex = NULL;
	}
}

static bool make(enum ibv_qp_type type, bool srq, bool extended)
{
	drop();
	return make_qp(&ends[0], type, false, extended) && make_qp(&ends[1], type, srq, false) &&
	       connect_qp(&ends[0], &ends[1]) && connect_qp(&ends[1], &ends[0]);
}

static bool open_end(struct end *e, const char *name)
{
	struct ibv_device **list = ibv_get_device_list(NULL), **at;

	for (at = list; at && *at && strcmp(ibv_get_device_name(*at), name); at++)
		;
	TRY(at && *at);
	TRY((e->ctx = ibv_open_device(*at)));
	ibv_free_device_list(list);
	TRY((e->pd = ibv_alloc_pd(e->ctx)));
	TRY(!ibv_query_gid(e->ctx, 1, 0, &e->gid));
	return true;
}

/* ---- Work requests --------------------------------------------------------------------------- */

/* The status of the next completion of a kind, and the completion; -1: none came. */
static int next(struct end *e, struct ibv_wc *wc)
{
	double end = now() + WAIT_MS / 1e3;

	while (now() < end) {
		if (ibv_poll_cq(e->cq, 1, wc) > 0)
			return (int)wc->status;
	}
	return -1;
}

static bool done(struct end *e, struct ibv_wc *wc, enum ibv_wc_status wanted)
{
	int status = next(e, wc);

	if (status != (int)wanted)
		return fail("a completion has %d (%s), not %s", status,
			    status < 0 ? "none" : ibv_wc_status_str((enum ibv_wc_status)status),
			    ibv_wc_status_str(wanted));
	return true;
}

static struct ibv_sge sge(const void *addr, uint32_t len, const struct ibv_mr *mr)
{
	return (struct ibv_sge){ (uintptr_t)addr, len, mr->lkey };
}

static bool receive(struct end *e, uint64_t id, struct ibv_sge *list, int num)
{
	struct ibv_recv_wr *bad, wr = { .wr_id = id, .sg_list = list, .num_sge = num };

	TRY(!(e->srq ? ibv_post_srq_recv(e->srq, &wr, &bad) : ibv_post_recv(e->qp, &wr, &bad)));
	return true;
}

/* Of an RDMA or atomic operation: what is named at the peer. */
struct remote {
	const void *addr;
	const struct ibv_mr *mr;
	uint64_t first, second;
};

static bool post(enum ibv_wr_opcode op, unsigned int flags, struct ibv_sge local, struct remote far)
{
	struct ibv_send_wr *bad, wr = {
		.sg_list = &local, .num_sge = 1, .opcode = op, .send_flags = flags, .imm_data = 5,
	};

	if (op == IBV_WR_ATOMIC_FETCH_AND_ADD || op == IBV_WR_ATOMIC_CMP_AND_SWP) {
		wr.wr.atomic.remote_addr = (uintptr_t)far.addr;
		wr.wr.atomic.rkey = far.mr->rkey;
		wr.wr.atomic.compare_add = far.first;
		wr.wr.atomic.swap = far.second;
	} else if (far.mr) {
		wr.wr.rdma.remote_addr = (uintptr_t)far.addr;
		wr.wr.rdma.rkey = far.mr->rkey;
	}
	TRY(!ibv_post_send(ends[0].qp, &wr, &bad));
	return true;
}

static bool does(enum ibv_wr_opcode op, struct ibv_sge local, struct remote far,
		 enum ibv_wc_status wanted)
{
	struct ibv_wc wc;

	return post(op, IBV_SEND_SIGNALED, local, far) && done(&ends[0], &wc, wanted);
}

/* ---- Memory ---------------------------------------------------------------------------------- */

enum { ROOM = 3 * 4096, AT = 1000, LEN = 5001 };

static uint8_t bss[2][ROOM];
static uint8_t data[2][ROOM] = { { 1 }, { 1 } };

static void *map(size_t len, int rights)
{
	void *at = mmap(NULL, len, rights, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);

	return at == MAP_FAILED ? NULL : at;
}

static void fill(uint8_t *at, size_t len, unsigned int seed)
{
	size_t i;

	for (i = 0; i < len; i++)
		at[i] = (uint8_t)(i * 7 + i / 251 + seed);
}

/* Whether LEN bytes of `far` are those of `near` and the others are 0xee, as they were. */
static bool moved(const uint8_t *near, const uint8_t *far)
{
	size_t i;

	for (i = 0; i < ROOM; i++) {
		bool inside = i >= AT && i < AT + LEN;

		if (far[i] != (inside ? near[i] : 0xee))
			return fail("byte %zu is %#x", i, far[i]);
	}
	return true;
}

/* Every operation between two pieces of memory, at odd places and lengths. */
static bool operate(uint8_t *near, uint8_t *far)
{
	struct ibv_mr *near_mr = ibv_reg_mr(ends[0].pd, near, ROOM, ALL);
	struct ibv_mr *far_mr = ibv_reg_mr(ends[1].pd, far, ROOM, ALL);
	struct remote there = { far + AT, far_mr, 0, 0 };
	struct ibv_sge part, two[2];
	struct ibv_wc wc;

	TRY(near_mr && far_mr);
	part = sge(near + AT, LEN, near_mr);
	MUST(make(IBV_QPT_RC, false, false));
	fill(near, ROOM, 1);
	memset(far, 0xee, ROOM);
	MUST(does(IBV_WR_RDMA_WRITE, part, there, IBV_WC_SUCCESS) && moved(near, far));

	fill(near, ROOM, 2);
	memset(far, 0xee, ROOM);
	two[0] = sge(far + AT, 999, far_mr);
	two[1] = sge(far + AT + 999, LEN - 999 + 500, far_mr);
	MUST(receive(&ends[1], 1, two, 2));
	MUST(does(IBV_WR_SEND, part, (struct remote){ 0 }, IBV_WC_SUCCESS));
	MUST(done(&ends[1], &wc, IBV_WC_SUCCESS));
	TRY(wc.byte_len == LEN);
	MUST(moved(near, far));

	/* A write with an immediate takes a receive, whose memory stays as it is. */
	two[0] = sge(far, 100, far_mr);
	MUST(receive(&ends[1], 2, two, 1));
	fill(near, ROOM, 3);
	MUST(does(IBV_WR_RDMA_WRITE_WITH_IMM, part, there, IBV_WC_SUCCESS));
	MUST(done(&ends[1], &wc, IBV_WC_SUCCESS) && moved(near, far));

	fill(far, ROOM, 4);
	memset(near, 0xee, ROOM);
	MUST(does(IBV_WR_RDMA_READ, part, there, IBV_WC_SUCCESS) && moved(far, near));
	TRY(!ibv_dereg_mr(near_mr) && !ibv_dereg_mr(far_mr));
	return true;
}

static bool kinds(void)
{
	uint8_t stack[2][ROOM];
	uint8_t *heap = malloc(2 * ROOM + 1), *mapped = map(2 * ROOM, PROT_READ | PROT_WRITE);

	TRY(heap && mapped);
	MUST(operate(stack[0], stack[1]) && operate(bss[0], bss[1]) && operate(data[0], data[1]));
	MUST(operate(heap + 1, heap + 1 + ROOM) && operate(mapped, mapped + ROOM));
	MUST(operate(heap + 1, bss[1]) && operate(bss[0], heap + 1));
	free(heap);
	munmap(mapped, 2 * ROOM);
	return true;
}

static bool large(void)
{
	size_t len = 40 << 20;
	uint8_t *near = map(len, PROT_READ | PROT_WRITE), *far = map(len, PROT_READ | PROT_WRITE);
	struct ibv_mr *near_mr, *far_mr;

	TRY(near && far);
	TRY((near_mr = ibv_reg_mr(ends[0].pd, near, len, ALL)));
	TRY((far_mr = ibv_reg_mr(ends[1].pd, far, len, ALL)));
	MUST(make(IBV_QPT_RC, false, false));
	fill(near, len, 9);
	MUST(does(IBV_WR_RDMA_WRITE, sge(near, (uint32_t)len, near_mr),
		  (struct remote){ far, far_mr, 0, 0 }, IBV_WC_SUCCESS));
	TRY(!memcmp(near, far, len));
	fill(far, len, 10);
	MUST(does(IBV_WR_RDMA_READ, sge(near, (uint32_t)len, near_mr),
		  (struct remote){ far, far_mr, 0, 0 }, IBV_WC_SUCCESS));
	TRY(!memcmp(near, far, len));
	TRY(!ibv_dereg_mr(near_mr) && !ibv_dereg_mr(far_mr));
	munmap(near, len);
	munmap(far, len);
	return true;
}

/*
 * What is posted at once is done in its order: the last of many writes to one place stays, a read
 * behind them brings it, and who is told by a message behind them finds it.
 */
static bool ordered(void)
{
	enum { MANY = 12 };
	uint8_t *near = map((MANY + 1) * ROOM, PROT_READ | PROT_WRITE);
	uint8_t *far = map(ROOM, PROT_READ | PROT_WRITE), *last = near + (MANY - 1) * ROOM;
	struct ibv_mr *near_mr = ibv_reg_mr(ends[0].pd, near, (MANY + 1) * ROOM, ALL);
	struct ibv_mr *far_mr = ibv_reg_mr(ends[1].pd, far, ROOM, ALL);
	struct remote there = { far + AT, far_mr, 0, 0 };
	struct ibv_sge back = sge(near + MANY * ROOM + AT, LEN, near_mr),
			      room = sge(far, 64, far_mr);
	struct ibv_wc wc;
	int round, i;

	TRY(near && far && near_mr && far_mr);
	MUST(make(IBV_QPT_RC, false, false));
	for (round = 0; round < 50; round++) {
		fill(near, MANY * ROOM, (unsigned int)round);
		memset(far, 0xee, ROOM);
		MUST(receive(&ends[1], 1, &room, 1));
		for (i = 0; i < MANY; i++)
			MUST(post(IBV_WR_RDMA_WRITE, 0, sge(near + i * ROOM + AT, LEN, near_mr),
				  there));
		MUST(post(IBV_WR_RDMA_READ, 0, back, there));
		MUST(post(IBV_WR_SEND, IBV_SEND_SIGNALED, sge(near, 8, near_mr),
			  (struct remote){ 0 }));
		MUST(done(&ends[1], &wc, IBV_WC_SUCCESS));
		TRY(!memcmp(far + AT, last + AT, LEN));
		MUST(done(&ends[0], &wc, IBV_WC_SUCCESS));
		TRY(!memcmp(near + MANY * ROOM + AT, last + AT, LEN));
	}
	TRY(!ibv_dereg_mr(near_mr) && !ibv_dereg_mr(far_mr));
	munmap(near, (MANY + 1) * ROOM);
	munmap(far, ROOM);
	return true;
}

/* A header of 40 bytes comes first; a datagram is shorter than what it is received in. */
static bool datagrams(void)
{
	struct ibv_mr *near_mr = ibv_reg_mr(ends[0].pd, bss[0], ROOM, ALL);
	struct ibv_mr *far_mr = ibv_reg_mr(ends[1].pd, bss[1], ROOM, ALL);
	struct ibv_ah_attr to = { .is_global = 1, .port_num = 1, .grh = { .dgid = ends[1].gid } };
	struct ibv_sge near = sge(bss[0], 777, near_mr), far = sge(bss[1], 2000, far_mr);
	struct ibv_send_wr *bad, wr = {
		.sg_list = &near, .num_sge = 1, .opcode = IBV_WR_SEND,
		.send_flags = IBV_SEND_SIGNALED,
	};
	struct ibv_wc wc;

	TRY(near_mr && far_mr);
	MUST(make(IBV_QPT_UD, false, false) && receive(&ends[1], 1, &far, 1));
	fill(bss[0], ROOM, 5);
	memset(bss[1], 0xee, ROOM);
	TRY((wr.wr.ud.ah = ibv_create_ah(ends[0].pd, &to)));
	wr.wr.ud.remote_qpn = ends[1].qp->qp_num;
	wr.wr.ud.remote_qkey = 7;
	TRY(!ibv_post_send(ends[0].qp, &wr, &bad));
	MUST(done(&ends[0], &wc, IBV_WC_SUCCESS) && done(&ends[1], &wc, IBV_WC_SUCCESS));
	TRY(wc.byte_len == 817 && !memcmp(bss[0], bss[1] + 40, 777) && bss[1][817] == 0xee);
	TRY(!ibv_destroy_ah(wr.wr.ud.ah) && !ibv_dereg_mr(near_mr) && !ibv_dereg_mr(far_mr));
	return true;
}

/* ---- Atomics --------------------------------------------------------------------------------- */

enum { TIMES = 20000 };
static uint64_t words[4] __attribute__((aligned(64)));

static void *increment(void *word)
{
	int i;

	for (i = 0; i < TIMES * 10; i++)
		__atomic_fetch_add((uint64_t *)word, 1, __ATOMIC_RELAXED);
	return NULL;
}

/* What the program's processors add meanwhile is lost no more than what comes from the peer. */
static bool atomics(void)
{
	struct ibv_mr *near_mr = ibv_reg_mr(ends[0].pd, bss[0], ROOM, ALL);
	struct ibv_mr *far_mr = ibv_reg_mr(ends[1].pd, words, sizeof(words), ALL);
	struct ibv_sge found = sge(bss[0] + 8, 8, near_mr);
	struct remote there = { &words[1], far_mr, 5, 77 };
	uint64_t before;
	pthread_t other;
	struct ibv_wc wc;
	int i;

	TRY(near_mr && far_mr);
	MUST(make(IBV_QPT_RC, false, false));
	memset(bss[0], 0xee, 24);
	words[0] = words[2] = 3;
	words[1] = 5;
	MUST(does(IBV_WR_ATOMIC_CMP_AND_SWP, found, there, IBV_WC_SUCCESS));
	memcpy(&before, bss[0] + 8, 8);
	TRY(before == 5 && words[1] == 77 && words[0] == 3 && words[2] == 3);
	MUST(does(IBV_WR_ATOMIC_CMP_AND_SWP, found, there, IBV_WC_SUCCESS));
	memcpy(&before, bss[0] + 8, 8);
	TRY(before == 77 && words[1] == 77 && bss[0][7] == 0xee && bss[0][16] == 0xee);
	words[1] = 0;
	there.first = 1;
	TRY(!pthread_create(&other, NULL, increment, &words[1]));
	for (i = 0; i < TIMES; i++) {
		MUST(post(IBV_WR_ATOMIC_FETCH_AND_ADD, i % 16 == 15 ? IBV_SEND_SIGNALED : 0, found,
			  there));
		if (i % 16 == 15)
			MUST(done(&ends[0], &wc, IBV_WC_SUCCESS));
	}
	pthread_join(other, NULL);
	TRY(words[1] == (uint64_t)TIMES * 11);
	/* A word of eight bytes is written as one. */
	before = 0x1122334455667788;
	memcpy(bss[0] + 8, &before, 8);
	MUST(does(IBV_WR_RDMA_WRITE, found, there, IBV_WC_SUCCESS));
	TRY(words[1] == before && words[0] == 3 && words[2] == 3);
	TRY(!ibv_dereg_mr(near_mr) && !ibv_dereg_mr(far_mr));
	return true;
}

/* ---- Faults ---------------------------------------------------------------------------------- */

/* Memory that is unmapped while it is registered: the peer's fault, and nobody ends. */
static bool unmapped(void)
{
	const enum ibv_wr_opcode ops[] = {
		IBV_WR_RDMA_WRITE, IBV_WR_RDMA_READ, IBV_WR_ATOMIC_FETCH_AND_ADD,
		IBV_WR_ATOMIC_CMP_AND_SWP,
	};
	uint8_t *far = map(ROOM, PROT_READ | PROT_WRITE);
	struct ibv_mr *near_mr = ibv_reg_mr(ends[0].pd, bss[0], ROOM, ALL), *far_mr;
	struct remote there;
	unsigned int i;

	TRY(near_mr && far && (far_mr = ibv_reg_mr(ends[1].pd, far, ROOM, ALL)));
	there = (struct remote){ far + 4096, far_mr, 0, 0 };
	MUST(make(IBV_QPT_RC, false, false));
	MUST(does(IBV_WR_RDMA_WRITE, sge(bss[0], 8, near_mr), there, IBV_WC_SUCCESS));
	TRY(!munmap(far, ROOM));
	for (i = 0; i < sizeof(ops) / sizeof(ops[0]); i++) {
		MUST(make(IBV_QPT_RC, false, false));
		MUST(does(ops[i], sge(bss[0], 8, near_mr), there, IBV_WC_REM_OP_ERR));
		MUST(make(IBV_QPT_RC, false, false));
		if (i < 2)
			MUST(does(ops[i], sge(bss[0], 4096, near_mr), there, IBV_WC_REM_OP_ERR));
	}
	TRY(!ibv_dereg_mr(near_mr) && !ibv_dereg_mr(far_mr));
	return true;
}

/* An address far behind a piece of memory, which is only named. */
static const void *past(const void *at, uintptr_t bytes)
{
	return (const void *)((uintptr_t)at + bytes);
}

/* The device knows more of a region than the program has registered, and nobody may use it. */
static bool beyond(void)
{
	struct ibv_mr *near_mr = ibv_reg_mr(ends[0].pd, bss[0], 5000, ALL);
	struct ibv_mr *far_mr = ibv_reg_mr(ends[1].pd, bss[1], 5000, ALL);
	struct remote there = { bss[1] + 4990, far_mr, 0, 0 }, good = { bss[1], far_mr, 0, 0 };
	struct ibv_sge list;
	struct ibv_wc wc;
	int op;

	TRY(near_mr && far_mr);
	memset(bss[1], 0xee, ROOM);
	for (op = 0; op < 2; op++) {
		enum ibv_wr_opcode code = op ? IBV_WR_RDMA_READ : IBV_WR_RDMA_WRITE;
		enum ibv_wc_status status;

		MUST(make(IBV_QPT_RC, false, false));
		MUST(post(code, IBV_SEND_SIGNALED, sge(bss[0], 11, near_mr), there));
		status = (enum ibv_wc_status)next(&ends[0], &wc);
		TRY(status == IBV_WC_REM_OP_ERR || status == IBV_WC_REM_ACCESS_ERR);
		there.addr = past(bss[1], 20000);
		MUST(make(IBV_QPT_RC, false, false));
		MUST(does(code, sge(bss[0], 11, near_mr), there, IBV_WC_REM_ACCESS_ERR));
		there.addr = bss[1] + 4990;
		MUST(make(IBV_QPT_RC, false, false));
		MUST(does(code, sge(bss[0] + 4990, 11, near_mr), good, IBV_WC_LOC_PROT_ERR));
	}
	MUST(make(IBV_QPT_RC, false, false));
	list = sge(bss[1] + 4990, 11, far_mr);
	MUST(receive(&ends[1], 1, &list, 1));
	MUST(post(IBV_WR_SEND, IBV_SEND_SIGNALED, sge(bss[0], 11, near_mr), good));
	MUST(done(&ends[1], &wc, IBV_WC_LOC_PROT_ERR));
	TRY(bss[1][4990] == 0xee && bss[1][5000] == 0xee);
	TRY(!ibv_dereg_mr(near_mr) && !ibv_dereg_mr(far_mr));
	return true;
}

/* What cannot be registered, and what can. */
static bool refused(void)
{
	uint8_t *part = map(3 * 4096, PROT_READ | PROT_WRITE), *fixed = map(4096, PROT_READ);
	struct ibv_mr *mr;

	TRY(part && fixed && !munmap(part + 4096, 4096));
	TRY(!ibv_reg_mr(ends[0].pd, part, 3 * 4096, ALL) && errno == EFAULT);
	TRY(!ibv_reg_mr(ends[0].pd, part + 4096, 10, 0) && errno == EFAULT);
	TRY(!ibv_reg_mr(ends[0].pd, fixed, 4096, IBV_ACCESS_LOCAL_WRITE) && errno == EFAULT);
	TRY((mr = ibv_reg_mr(ends[0].pd, fixed, 4096, 0)));
	TRY(!ibv_dereg_mr(mr));
	TRY(!ibv_reg_mr(ends[0].pd, part, 4096, IBV_ACCESS_REMOTE_WRITE));
	munmap(part, 4096);
	munmap(part + 8192, 4096);
	munmap(fixed, 4096);
	return true;
}

#include "process-private-cases.h"
#include "process-private-contexts.h"
#include "process-private-files.h"
#include "process-private-limits.h"
#include "process-private-words.h"

static const struct {
	const char *name;
	bool (*run)(void);
	bool by_name;	/* only */
} cases[] = {
	{ "kinds", kinds, false },
	{ "large", large, false },
	{ "ordered", ordered, false },
	{ "datagrams", datagrams, false },
	{ "atomics", atomics, false },
	{ "words", whole_words, false },
	{ "words-filtered", words_filtered, true },
	{ "fenced-beside", fenced_beside, false },
	{ "unmapped", unmapped, false },
	{ "beyond", beyond, false },
	{ "refused", refused, false },
	{ "windows", windows, false },
	{ "unsignaled", unsignaled, false },
	{ "fenced", fenced, false },
	{ "shared-queue", shared_queue, false },
	{ "extended", extended, false },
	{ "queues", queues, false },
	{ "moves", moves, false },
	{ "leaves", leaves, false },
	{ "turnover", turnover, false },
	{ "fork", forks, false },
	{ "registrars", registrars, false },
	{ "reopened", reopened, false },
	{ "fork-beside", fork_beside, false },
	{ "pages-of-others", pages_of_others, false },
	{ "many-queues", many_queues, false },
	{ "many-srqs", many_srqs, false },
	{ "names", names, false },
	{ "files", files, false },
	{ "readable", readable, false },
	{ "replaced", replaced, false },
	{ "cut", cut, false },
	{ "unserved", unserved, false },
	{ "locks", locks, false },
	{ "many-files", many_files, false },
	{ "unlimited", unlimited, false },
	{ "fork-init", fork_init, false },
	{ "unmap-files", unmap_files, false },
	{ "bystander", bystander, false },
	{ "forking", forking, true },
	{ "unmapping", unmapping, true },
	{ "hangs", hangs, true },
	{ "asleep", asleep, true },
};

int main(int argc, char **argv)
{
	bool good = argc >= 3;
	size_t i;

	if (!good || !open_end(&ends[0], argv[1]) || !open_end(&ends[1], argv[2])) {
		fprintf(stderr, "process-private DEVICE DEVICE [CASE | --bandwidth]: %s\n", why);
		return 1;
	}
	if (argc > 3 && !strcmp(argv[3], "--bandwidth"))
		return !bandwidth() && printf("fail bandwidth: %s\n", why);
	for (i = 0; i < sizeof(cases) / sizeof(cases[0]); i++) {
		bool ok;

		if (argc > 3 ? strcmp(argv[3], cases[i].name) : cases[i].by_name)
			continue;
		ok = cases[i].run();
		drop();
		printf(ok ? "ok %s\n" : "fail %s: %s\n", cases[i].name, why);
		fflush(stdout);
		good &= ok;
	}
	for (i = 0; i < 2; i++) {
		if (ibv_dealloc_pd(ends[i].pd) || ibv_close_device(ends[i].ctx)) {
			printf("fail end: something is left\n");
			good = false;
		}
	}
	return !good;
}
