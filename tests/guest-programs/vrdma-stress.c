// SPDX-License-Identifier: Apache-2.0 OR MIT
/*
 * vrdma-stress: the life of verbs objects on one device, talking to itself.
 *
 * vrdma-check looks at data; this program looks at what happens around it: queues that fill, wrap
 * and are reset with completions still in the CQ, QPs that vanish, CQs that move, threads that
 * share a queue, children that write to the parent's pages, more QPs than one doorbell page has
 * slots. Each scenario checks every completion it gets and that no other comes. Plain libibverbs;
 * what it demands is IBTA's, and not every device gives it (rdma_rxe leaves completions of an
 * earlier life in the CQ after RESET, and so fails the first scenario).
 *
 * One JSON line {"op","ok","seconds"} per scenario; the first failure ends the program with status
 * 1.
 *
 * Build: gcc -O2 -Wall -Wextra -o vrdma-stress vrdma-stress.c -libverbs -lpthread
 */
#define _GNU_SOURCE
#include <errno.h>
#include <infiniband/verbs.h>
#include <pthread.h>
#include <sched.h>
#include <stdbool.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

enum { DEPTH = 16, MEMORY = 1 << 20, RECEIVE_AT = 1 << 16, RECEIVE_LEN = 4096, PATIENCE_S = 40,
       THREADS = 4 };

static struct {
	struct ibv_context *ctx;
	struct ibv_pd *pd;
	struct ibv_mr *mr;
	union ibv_gid gid;
	char *memory;
	int gid_index;
	uint32_t many;
	bool exact;		/* the device gives the depth that it is asked for, not more */
} dev = { .gid_index = 1, .many = 1200 };

/* Two connected QPs and the CQs that they share. */
struct pair {
	struct ibv_cq *send_cq, *recv_cq;
	struct ibv_qp *a, *b;
};

static double now(void)
{
	struct timespec t;

	clock_gettime(CLOCK_MONOTONIC, &t);
	return (double)t.tv_sec + (double)t.tv_nsec * 1e-9;
}

__attribute__((noreturn)) static void failed(const char *function, int line, const char *what)
{
	printf("{\"op\":\"%s\",\"ok\":false,\"error\":\"line %d: %s\"}\n", function, line, what);
	exit(1);
}

#define CHECK(condition)                                        \
	do {                                                    \
		if (!(condition))                               \
			failed(__func__, __LINE__, #condition); \
	} while (0)

/* ---- Verbs ----------------------------------------------------------------------------------- */

static struct ibv_qp *make_qp(struct ibv_cq *send, struct ibv_cq *recv, struct ibv_srq *srq)
{
	struct ibv_qp_init_attr init = {
		.send_cq = send,
		.recv_cq = recv,
		.srq = srq,
		.qp_type = IBV_QPT_RC,
		.cap = { .max_send_wr = DEPTH, .max_recv_wr = DEPTH, .max_send_sge = 1,
			 .max_recv_sge = 1 },
	};
	struct ibv_qp *qp = ibv_create_qp(dev.pd, &init);

	CHECK(qp);
	dev.exact = init.cap.max_send_wr == DEPTH && (srq || init.cap.max_recv_wr == DEPTH);
	return qp;
}

static void connect_qp(struct ibv_qp *qp, uint32_t peer)
{
	struct ibv_qp_attr attr = { .qp_state = IBV_QPS_INIT, .port_num = 1 };

	CHECK(!ibv_modify_qp(qp, &attr, IBV_QP_STATE | IBV_QP_PKEY_INDEX | IBV_QP_PORT |
			     IBV_QP_ACCESS_FLAGS));
	attr = (struct ibv_qp_attr){
		.qp_state = IBV_QPS_RTR,
		.path_mtu = IBV_MTU_1024,
		.dest_qp_num = peer,
		.min_rnr_timer = 1,
		.ah_attr = { .is_global = 1, .port_num = 1,
			     .grh = { .dgid = dev.gid, .sgid_index = (uint8_t)dev.gid_index,
				      .hop_limit = 1 } },
	};
	CHECK(!ibv_modify_qp(qp, &attr, IBV_QP_STATE | IBV_QP_AV | IBV_QP_PATH_MTU |
			     IBV_QP_DEST_QPN | IBV_QP_RQ_PSN | IBV_QP_MAX_DEST_RD_ATOMIC |
			     IBV_QP_MIN_RNR_TIMER));
	attr = (struct ibv_qp_attr){ .qp_state = IBV_QPS_RTS, .timeout = 16, .retry_cnt = 7,
				     .rnr_retry = 7 };
	CHECK(!ibv_modify_qp(qp, &attr, IBV_QP_STATE | IBV_QP_TIMEOUT | IBV_QP_RETRY_CNT |
			     IBV_QP_RNR_RETRY | IBV_QP_SQ_PSN | IBV_QP_MAX_QP_RD_ATOMIC));
}

static void reset_qp(struct ibv_qp *qp)
{
	struct ibv_qp_attr attr = { .qp_state = IBV_QPS_RESET };

	CHECK(!ibv_modify_qp(qp, &attr, IBV_QP_STATE));
}

static struct ibv_cq *make_cq(int entries)
{
	struct ibv_cq *cq = ibv_create_cq(dev.ctx, entries, NULL, NULL, 0);

	CHECK(cq);
	return cq;
}

static void connect_pair(struct pair *p)
{
	connect_qp(p->a, p->b->qp_num);
	connect_qp(p->b, p->a->qp_num);
}

static struct pair make_pair(struct ibv_cq *send_cq, struct ibv_cq *recv_cq, struct ibv_srq *srq)
{
	struct pair p = { send_cq, recv_cq, make_qp(send_cq, recv_cq, srq),
			  make_qp(send_cq, recv_cq, srq) };

	return p;
}

static void destroy_pair(struct pair *p)
{
	CHECK(!ibv_destroy_qp(p->a));
	CHECK(!ibv_destroy_qp(p->b));
}

static int post_send(struct ibv_qp *qp, uint64_t id, bool signaled, uint32_t len)
{
	struct ibv_sge sge = { .addr = (uintptr_t)dev.memory, .length = len, .lkey = dev.mr->lkey };
	struct ibv_send_wr *bad, wr = { .wr_id = id, .sg_list = &sge, .num_sge = 1,
					.opcode = IBV_WR_SEND,
					.send_flags = signaled ? IBV_SEND_SIGNALED : 0 };

	return ibv_post_send(qp, &wr, &bad);
}

static struct ibv_sge receive_sge(void)
{
	return (struct ibv_sge){ .addr = (uintptr_t)dev.memory + RECEIVE_AT, .length = RECEIVE_LEN,
				 .lkey = dev.mr->lkey };
}

static int post_receive(struct ibv_qp *qp, uint64_t id)
{
	struct ibv_sge sge = receive_sge();
	struct ibv_recv_wr *bad, wr = { .wr_id = id, .sg_list = &sge, .num_sge = 1 };

	return ibv_post_recv(qp, &wr, &bad);
}

/* Exactly `want` successful completions. */
static void take(struct ibv_cq *cq, int want, struct ibv_wc *wc)
{
	double end = now() + PATIENCE_S;
	int n = 0, i;

	while (n < want) {
		int got = ibv_poll_cq(cq, want - n, wc + n);

		CHECK(got >= 0 && now() < end);
		if (!got)
			sched_yield();
		n += got;
	}
	for (i = 0; i < want; i++)
		CHECK(wc[i].status == IBV_WC_SUCCESS);
}

static bool is_receive(const struct ibv_wc *wc)
{
	return wc->opcode & IBV_WC_RECV;
}

/* ---- Scenarios ------------------------------------------------------------------------------- */

/*
 * One life of a pair: both queues full to the brim, `how` decides what is polled before the next
 * RESET.
 */
static void live(struct pair *p, uint64_t base, int how)
{
	struct ibv_wc wc[DEPTH];
	int i;

	CHECK(post_receive(p->a, 1) == EINVAL && post_send(p->a, 1, true, 8) == EINVAL);
	connect_pair(p);
	for (i = 0; i < DEPTH; i++)
		CHECK(!post_receive(p->b, base + i));
	CHECK(!dev.exact || post_receive(p->b, 1) == ENOMEM);
	for (i = 0; i < DEPTH; i++)
		CHECK(!post_send(p->a, base + 100 + i, true, 100));
	CHECK(!dev.exact || post_send(p->a, 1, true, 8) == ENOMEM);
	if (how == 0) {
		take(p->send_cq, DEPTH, wc);
		for (i = 0; i < DEPTH; i++)
			CHECK(wc[i].wr_id == base + 100 + i);
		take(p->recv_cq, DEPTH, wc);
		for (i = 0; i < DEPTH; i++)
			CHECK(wc[i].wr_id == base + i && wc[i].byte_len == 100);
	} else if (how == 1) {
		take(p->send_cq, 3, wc);
		take(p->recv_cq, 5, wc);
	}
}

/*
 * No completion of an earlier life may be seen after RESET, and nothing of it may be in the way of
 * the next.
 */
static void reset(void)
{
	struct ibv_cq *send_cq = make_cq(4 * DEPTH), *recv_cq = make_cq(4 * DEPTH);
	struct pair p = make_pair(send_cq, recv_cq, NULL);
	struct ibv_wc wc;
	int round;

	for (round = 0; round < 60; round++) {
		live(&p, 1000u * round, round % 3);
		reset_qp(p.a);
		reset_qp(p.b);
		CHECK(!ibv_poll_cq(send_cq, 1, &wc) && !ibv_poll_cq(recv_cq, 1, &wc));
	}
	destroy_pair(&p);
	CHECK(!ibv_destroy_cq(send_cq) && !ibv_destroy_cq(recv_cq));
}

/* The completions of destroyed QPs vanish from the CQ, those of their neighbours stay. */
static void destroy(void)
{
	struct ibv_cq *cq = make_cq(8 * DEPTH);
	struct pair gone = make_pair(cq, cq, NULL), stays = make_pair(cq, cq, NULL);
	struct ibv_wc wc[DEPTH];
	int i;

	connect_pair(&gone);
	connect_pair(&stays);
	for (i = 0; i < DEPTH / 2; i++) {
		CHECK(!post_receive(gone.b, i) && !post_receive(stays.b, 50 + i));
		CHECK(!post_send(gone.a, i, true, 8) && !post_send(stays.a, 50 + i, true, 8));
	}
	usleep(100000);
	destroy_pair(&gone);
	take(cq, DEPTH, wc);
	for (i = 0; i < DEPTH; i++)
		CHECK(wc[i].wr_id >= 50);
	CHECK(!ibv_poll_cq(cq, 1, wc));
	destroy_pair(&stays);
	CHECK(!ibv_destroy_cq(cq));
}

/*
 * Slots of unsignaled requests come back with the next signaled one; the rings wrap hundreds of
 * times.
 */
static void unsignaled(void)
{
	struct ibv_cq *cq = make_cq(4 * DEPTH);
	struct pair p = make_pair(cq, cq, NULL);
	uint64_t sent = 0, received = 0, i;
	double end = now() + PATIENCE_S;

	connect_pair(&p);
	for (i = 0; i < DEPTH; i++)
		CHECK(!post_receive(p.b, i));
	while (received < 5000) {
		struct ibv_wc wc;
		int ret = sent < 5000 ? post_send(p.a, sent, sent % 8 == 7, 64 + sent % 100) :
			  ENOMEM;

		CHECK(!ret || ret == ENOMEM);
		sent += !ret;
		CHECK(now() < end);
		if (ibv_poll_cq(cq, 1, &wc) != 1)
			continue;
		CHECK(wc.status == IBV_WC_SUCCESS);
		if (is_receive(&wc)) {
			CHECK(wc.wr_id == received && wc.byte_len == 64 + received % 100);
			CHECK(!post_receive(p.b, DEPTH + received++));
		} else {
			CHECK(wc.wr_id % 8 == 7);
		}
	}
	destroy_pair(&p);
	CHECK(!ibv_destroy_cq(cq));
}

static uint32_t fill_srq(struct ibv_srq *srq)
{
	struct ibv_sge sge = receive_sge();
	struct ibv_recv_wr *bad, wr = { .sg_list = &sge, .num_sge = 1 };
	uint32_t n = 0;
	int ret;

	while (!(ret = ibv_post_srq_recv(srq, &wr, &bad)))
		n++;
	CHECK(ret == ENOMEM && bad == &wr);
	return n;
}

/* An SRQ of two QPs takes exactly what it was asked for, and again as much as was consumed. */
static void shared_receive(void)
{
	struct ibv_srq_init_attr init = { .attr = { .max_wr = 20, .max_sge = 1 } };
	struct ibv_srq *srq = ibv_create_srq(dev.pd, &init);
	struct ibv_cq *cq = make_cq(8 * DEPTH);
	struct pair p = make_pair(cq, cq, srq);
	struct ibv_wc wc[24];
	int round, i;

	CHECK(srq);
	connect_pair(&p);
	CHECK(post_receive(p.a, 1) == EINVAL);
	for (round = 0; round < 200; round++) {
		CHECK(fill_srq(srq) == (round ? 12 : init.attr.max_wr));
		for (i = 0; i < 6; i++)
			CHECK(!post_send(p.a, 1, true, 8) && !post_send(p.b, 2, true, 8));
		take(cq, 24, wc);
	}
	destroy_pair(&p);
	CHECK(!ibv_destroy_srq(srq) && !ibv_destroy_cq(cq));
}

/*
 * A CQ grows and shrinks while completions arrive and wait in it: none lost, none twice, in order.
 */
static void resize(void)
{
	static const int sizes[] = { 64, 33, 256, 20, 1024, 17 };
	struct ibv_cq *cq = make_cq(32);
	struct pair p = make_pair(cq, cq, NULL);
	struct ibv_wc wc[16];
	uint64_t id = 0;
	int round, i;

	connect_pair(&p);
	for (round = 0; round < 60; round++, id += 8) {
		uint64_t next_send = id, next_receive = id;
		int ret, first = round % 5;

		for (i = 0; i < 8; i++)
			CHECK(!post_receive(p.b, id + i) && !post_send(p.a, id + i, true, 8));
		take(cq, first, wc);
		ret = ibv_resize_cq(cq, sizes[round % 6]);
		CHECK(ret == EOPNOTSUPP || (!ret && cq->cqe >= sizes[round % 6]));
		take(cq, 16 - first, wc + first);
		for (i = 0; i < 16; i++)
			CHECK(wc[i].wr_id == (is_receive(&wc[i]) ? next_receive++ : next_send++));
	}
	destroy_pair(&p);
	CHECK(!ibv_destroy_cq(cq));
}

static struct ibv_qp *common_qp;

static void *post_in_common(void *which)
{
	uint64_t id = (uintptr_t)which * 1000, n = 0;

	while (n < 500) {
		int ret = post_send(common_qp, id + n, true, 16);

		CHECK(!ret || ret == ENOMEM);
		n += !ret;
		if (ret)
			sched_yield();
	}
	return NULL;
}

/* Threads that post to one QP: each one's requests complete in its order. */
static void common_queue(void)
{
	struct ibv_cq *cq = make_cq(4 * DEPTH);
	struct pair p = make_pair(cq, cq, NULL);
	uint64_t next[THREADS] = {}, received = 0, i;
	pthread_t thread[THREADS];
	struct ibv_wc wc;
	int left;

	connect_pair(&p);
	common_qp = p.a;
	for (i = 0; i < DEPTH; i++)
		CHECK(!post_receive(p.b, i));
	for (i = 0; i < THREADS; i++)
		CHECK(!pthread_create(&thread[i], NULL, post_in_common, (void *)(uintptr_t)i));
	for (left = 2 * THREADS * 500; left; left--) {
		take(cq, 1, &wc);
		if (is_receive(&wc)) {
			CHECK(wc.wr_id == received);
			CHECK(!post_receive(p.b, DEPTH + received++));
		} else {
			CHECK(wc.wr_id % 1000 == next[wc.wr_id / 1000]++);
		}
	}
	for (i = 0; i < THREADS; i++)
		pthread_join(thread[i], NULL);
	destroy_pair(&p);
	CHECK(!ibv_destroy_cq(cq));
}

static void *own_pair(void *arg)
{
	struct pair *p = arg;
	uint64_t sent = 0, received = 0, i;
	double end = now() + PATIENCE_S;
	struct ibv_wc wc;

	for (i = 0; i < DEPTH; i++)
		CHECK(!post_receive(p->b, i));
	while (received < 1000) {
		CHECK(now() < end);
		if (sent < 1000 && !post_send(p->a, sent, true, 32))
			sent++;
		if (ibv_poll_cq(p->send_cq, 1, &wc) != 1) {
			sched_yield();
			continue;
		}
		CHECK(wc.status == IBV_WC_SUCCESS);
		if (is_receive(&wc)) {
			CHECK(wc.wr_id == received);
			CHECK(!post_receive(p->b, DEPTH + received++));
		}
	}
	return NULL;
}

/* Threads with queues of their own, which share a doorbell page's summary byte. */
static void own_queues(void)
{
	pthread_t thread[THREADS];
	struct pair p[THREADS];
	int i;

	for (i = 0; i < THREADS; i++) {
		struct ibv_cq *cq = make_cq(4 * DEPTH);

		p[i] = make_pair(cq, cq, NULL);
		connect_pair(&p[i]);
		CHECK(!pthread_create(&thread[i], NULL, own_pair, &p[i]));
	}
	for (i = 0; i < THREADS; i++) {
		pthread_join(thread[i], NULL);
		destroy_pair(&p[i]);
		CHECK(!ibv_destroy_cq(p[i].send_cq));
	}
}

/* A child that writes to its memory must not part the rings of the parent from the device. */
static void children(void)
{
	struct ibv_cq *cq = make_cq(DEPTH);
	struct pair p = make_pair(cq, cq, NULL);
	struct ibv_wc wc[2];
	int i, status;

	connect_pair(&p);
	for (i = 1; i <= 30; i++) {
		pid_t child = fork();

		if (!child) {
			char stack[1000];

			memset(stack, i, sizeof(stack));
			_exit(stack[i] != i);
		}
		memset(dev.memory, i, 100);
		CHECK(!post_receive(p.b, i) && !post_send(p.a, i, true, 100));
		take(cq, 2, wc);
		CHECK(dev.memory[RECEIVE_AT] == i && dev.memory[RECEIVE_AT + 99] == i);
		CHECK(waitpid(child, &status, 0) == child && !status);
	}
	destroy_pair(&p);
	CHECK(!ibv_destroy_cq(cq));
}

/* More QPs than a doorbell page has slots, all in one CQ: every completion names its QP. */
static void many(void)
{
	struct pair *p = calloc(dev.many / 2, sizeof(*p));
	struct ibv_cq *cq = make_cq((int)dev.many * 2);
	uint32_t i;

	CHECK(p);
	for (i = 0; i < dev.many / 2; i++) {
		p[i] = make_pair(cq, cq, NULL);
		connect_pair(&p[i]);
		CHECK(!post_receive(p[i].b, i));
	}
	for (i = 0; i < dev.many / 2; i++)
		CHECK(!post_send(p[i].a, i, true, 40));
	for (i = 0; i < dev.many / 2 * 2; i++) {
		struct ibv_wc wc;

		take(cq, 1, &wc);
		CHECK(wc.wr_id < dev.many / 2);
		CHECK(wc.qp_num == (is_receive(&wc) ? p[wc.wr_id].b : p[wc.wr_id].a)->qp_num);
	}
	for (i = 0; i < dev.many / 2; i++)
		destroy_pair(&p[i]);
	CHECK(!ibv_destroy_cq(cq));
	free(p);
}

/* ---- Program --------------------------------------------------------------------------------- */

static void open_device(const char *name)
{
	struct ibv_device **list = ibv_get_device_list(NULL);
	int i;

	for (i = 0; list && list[i] && !dev.ctx; i++)
		if (!name || !strcmp(name, ibv_get_device_name(list[i])))
			dev.ctx = ibv_open_device(list[i]);
	CHECK(dev.ctx);
	ibv_free_device_list(list);
	dev.pd = ibv_alloc_pd(dev.ctx);
	CHECK(dev.pd && !ibv_query_gid(dev.ctx, 1, dev.gid_index, &dev.gid));
	CHECK(!posix_memalign((void **)&dev.memory, 4096, MEMORY));
	memset(dev.memory, 0, MEMORY);
	dev.mr = ibv_reg_mr(dev.pd, dev.memory, MEMORY, IBV_ACCESS_LOCAL_WRITE);
	CHECK(dev.mr);
}

static void run(const char *name, void (*scenario)(void))
{
	double start = now();

	scenario();
	printf("{\"op\":\"%s\",\"ok\":true,\"seconds\":%.3f}\n", name, now() - start);
}

int main(int argc, char **argv)
{
	const char *name = NULL;
	int c;

	while ((c = getopt(argc, argv, "d:g:q:f")) != -1) {
		switch (c) {
		case 'd': name = optarg; break;
		case 'g': dev.gid_index = atoi(optarg); break;
		case 'q': dev.many = (uint32_t)atoi(optarg); break;
		case 'f': CHECK(!ibv_fork_init()); break;
		default:
			fprintf(stderr, "usage: vrdma-stress [-d device] [-g gid-index] [-q QPs] "
					"[-f (ibv_fork_init)]\n");
			return 2;
		}
	}
	setlinebuf(stdout);
	open_device(name);
	run("reset", reset);
	run("destroy", destroy);
	run("unsignaled", unsignaled);
	run("shared-receive", shared_receive);
	run("resize", resize);
	run("common-queue", common_queue);
	run("own-queues", own_queues);
	run("children", children);
	run("many", many);
	CHECK(!ibv_dereg_mr(dev.mr) && !ibv_dealloc_pd(dev.pd) && !ibv_close_device(dev.ctx));
	return 0;
}
