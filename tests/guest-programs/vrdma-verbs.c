// SPDX-License-Identifier: Apache-2.0 OR MIT
/*
 * vrdma-verbs: what no other suite looks at, through plain libibverbs against one device that talks
 * to itself.
 *
 * Each case makes its own QPs, provokes one thing and waits for what the standard says must follow:
 * events under moderation, the asynchronous events of CQs, SRQs and QPs, the states SQD and SQE;
 * numbers that three processes get and give back; memory of a dma-buf. A case prints "ok NAME" or
 * "fail NAME: why"; exit status 0 only if all were ok. A wait that ends with nothing is a failure,
 * never a skip.
 *
 *     vrdma-verbs -d DEVICE -g GID_INDEX [CASE...]
 *
 * Build: gcc -O2 -Wall -Wextra -o vrdma-verbs vrdma-verbs.c -libverbs
 */
#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <infiniband/verbs.h>
#include <linux/udmabuf.h>
#include <poll.h>
#include <stdarg.h>
#include <stdbool.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/ioctl.h>
#include <sys/mman.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

enum { WAIT_MS = 10000, DEPTH = 16, BYTES = 4096 };

static struct {
	struct ibv_context *ctx;
	struct ibv_pd *pd;
	struct ibv_mr *mr;
	union ibv_gid gid;
	int gid_index;
	char *buf;
	char why[256];
} dev;

static bool fail(const char *fmt, ...)
{
	va_list args;

	va_start(args, fmt);
	vsnprintf(dev.why, sizeof(dev.why), fmt, args);
	va_end(args);
	return false;
}

#define TRY(cond)                                                                                  \
	do {                                                                                       \
		if (!(cond))                                                                       \
			return fail("line %d: %s", __LINE__, #cond);                               \
	} while (0)

static uint64_t now_us(void)
{
	struct timespec ts;

	clock_gettime(CLOCK_MONOTONIC, &ts);
	return (uint64_t)ts.tv_sec * 1000000 + (uint64_t)ts.tv_nsec / 1000;
}

/* ---- A QP that is connected to itself, or to another ---- */

struct end {
	struct ibv_comp_channel *channel;
	struct ibv_cq *scq, *rcq;
	struct ibv_srq *srq;
	struct ibv_qp *qp;
};

static bool make(struct end *e, enum ibv_qp_type type, int scqe, bool srq, bool sig_all)
{
	struct ibv_srq_init_attr sattr = { .attr = { .max_wr = DEPTH, .max_sge = 1 } };
	struct ibv_qp_init_attr attr = {
		.cap = { .max_send_wr = DEPTH, .max_recv_wr = DEPTH, .max_send_sge = 1,
			 .max_recv_sge = 1 },
		.qp_type = type,
		.sq_sig_all = sig_all,
	};

	memset(e, 0, sizeof(*e));
	TRY((e->channel = ibv_create_comp_channel(dev.ctx)));
	TRY(!fcntl(e->channel->fd, F_SETFL, O_NONBLOCK));
	TRY((e->scq = ibv_create_cq(dev.ctx, scqe, e, e->channel, 0)));
	TRY((e->rcq = ibv_create_cq(dev.ctx, DEPTH, e, e->channel, 0)));
	if (srq)
		TRY((e->srq = ibv_create_srq(dev.pd, &sattr)));
	attr.send_cq = e->scq;
	attr.recv_cq = e->rcq;
	attr.srq = e->srq;
	TRY((e->qp = ibv_create_qp(dev.pd, &attr)));
	return true;
}

static void drop(struct end *e)
{
	if (e->qp)
		ibv_destroy_qp(e->qp);
	if (e->srq)
		ibv_destroy_srq(e->srq);
	if (e->scq)
		ibv_destroy_cq(e->scq);
	if (e->rcq)
		ibv_destroy_cq(e->rcq);
	if (e->channel)
		ibv_destroy_comp_channel(e->channel);
}

static bool connect_rc(struct end *e, uint32_t dest)
{
	struct ibv_qp_attr a = { .qp_state = IBV_QPS_INIT, .port_num = 1,
				 .qp_access_flags = IBV_ACCESS_REMOTE_WRITE };
	struct ibv_qp_attr rtr = {
		.qp_state = IBV_QPS_RTR, .path_mtu = IBV_MTU_1024, .dest_qp_num = dest,
		.max_dest_rd_atomic = 1,
		.min_rnr_timer = 12,
		.ah_attr = { .is_global = 1, .port_num = 1,
			     .grh = { .dgid = dev.gid, .sgid_index = (uint8_t)dev.gid_index,
				      .hop_limit = 64 } },
	};
	struct ibv_qp_attr rts = { .qp_state = IBV_QPS_RTS, .timeout = 14, .retry_cnt = 2,
				   .rnr_retry = 7, .max_rd_atomic = 1 };

	TRY(!ibv_modify_qp(e->qp, &a, IBV_QP_STATE | IBV_QP_PKEY_INDEX | IBV_QP_PORT |
			   IBV_QP_ACCESS_FLAGS));
	TRY(!ibv_modify_qp(e->qp, &rtr, IBV_QP_STATE | IBV_QP_AV | IBV_QP_PATH_MTU |
			   IBV_QP_DEST_QPN | IBV_QP_RQ_PSN | IBV_QP_MAX_DEST_RD_ATOMIC |
			   IBV_QP_MIN_RNR_TIMER));
	TRY(!ibv_modify_qp(e->qp, &rts, IBV_QP_STATE | IBV_QP_SQ_PSN | IBV_QP_TIMEOUT |
			   IBV_QP_RETRY_CNT | IBV_QP_RNR_RETRY | IBV_QP_MAX_QP_RD_ATOMIC));
	return true;
}

/* A write of 8 bytes to ourselves: a completion at the sender and nothing else. */
static bool post_write(struct end *e, uint64_t id)
{
	struct ibv_sge sge = { .addr = (uintptr_t)dev.buf, .length = 8, .lkey = dev.mr->lkey };
	struct ibv_send_wr wr = {
		.wr_id = id, .sg_list = &sge, .num_sge = 1, .opcode = IBV_WR_RDMA_WRITE,
		.send_flags = IBV_SEND_SIGNALED,
		.wr.rdma = { .remote_addr = (uintptr_t)dev.buf + 64, .rkey = dev.mr->rkey },
	}, *bad;

	TRY(!ibv_post_send(e->qp, &wr, &bad));
	return true;
}

static bool post_send(struct end *e, uint64_t id)
{
	struct ibv_sge sge = { .addr = (uintptr_t)dev.buf, .length = 8, .lkey = dev.mr->lkey };
	struct ibv_send_wr wr = { .wr_id = id, .sg_list = &sge, .num_sge = 1, .opcode = IBV_WR_SEND,
				  .send_flags = IBV_SEND_SIGNALED }, *bad;

	TRY(!ibv_post_send(e->qp, &wr, &bad));
	return true;
}

static bool post_srq(struct end *e, int count)
{
	struct ibv_sge sge = { .addr = (uintptr_t)dev.buf + 1024, .length = 64,
			       .lkey = dev.mr->lkey };
	struct ibv_recv_wr wr = { .sg_list = &sge, .num_sge = 1 }, *bad;

	while (count--)
		TRY(!ibv_post_srq_recv(e->srq, &wr, &bad));
	return true;
}

/* The next completion; its status, or -1 if none comes in time. */
static int completion(struct ibv_cq *cq, int ms, uint64_t *id)
{
	uint64_t end = now_us() + (uint64_t)ms * 1000;
	struct ibv_wc wc;

	do {
		int n = ibv_poll_cq(cq, 1, &wc);

		if (n < 0)
			return -1;
		if (n == 1) {
			if (id)
				*id = wc.wr_id;
			return (int)wc.status;
		}
		usleep(200);
	} while (now_us() < end);
	return -1;
}

static bool comp_event(struct end *e, int ms)
{
	struct pollfd p = { .fd = e->channel->fd, .events = POLLIN };
	struct ibv_cq *cq;
	void *context;

	if (poll(&p, 1, ms) != 1 || ibv_get_cq_event(e->channel, &cq, &context))
		return false;
	ibv_ack_cq_events(cq, 1);
	return true;
}

/*
 * Waits until an asynchronous event of this kind comes for this object; others are acknowledged and
 * passed over.
 */
static bool async_event(enum ibv_event_type type, const void *object, int ms)
{
	uint64_t end = now_us() + (uint64_t)ms * 1000;

	for (;;) {
		struct pollfd p = { .fd = dev.ctx->async_fd, .events = POLLIN };
		uint64_t now = now_us();
		struct ibv_async_event ev;
		bool found;

		if (now >= end || poll(&p, 1, (int)((end - now) / 1000) + 1) != 1 ||
		    ibv_get_async_event(dev.ctx, &ev))
			return false;
		/*
		 * The element is a union of pointers, and of a port number, which no case waits
		 * for.
		 */
		found = ev.event_type == type && (const void *)ev.element.qp == object;
		ibv_ack_async_event(&ev);
		if (found)
			return true;
	}
}

static enum ibv_qp_state state(struct ibv_qp *qp)
{
	struct ibv_qp_init_attr init;
	struct ibv_qp_attr attr;

	return ibv_query_qp(qp, &attr, IBV_QP_STATE, &init) ? IBV_QPS_UNKNOWN : attr.qp_state;
}

static bool set_state(struct ibv_qp *qp, enum ibv_qp_state to, int more, struct ibv_qp_attr attr)
{
	attr.qp_state = to;
	TRY(!ibv_modify_qp(qp, &attr, IBV_QP_STATE | more));
	return true;
}

/* ---- Cases ---- */

static bool moderate(struct ibv_cq *cq, uint16_t count, uint16_t us)
{
	struct ibv_modify_cq_attr attr = { .attr_mask = IBV_CQ_ATTR_MODERATE,
					   .moderate = { count, us } };

	TRY(!ibv_modify_cq(cq, &attr));
	return true;
}

static bool case_moderation(struct end *e)
{
	struct ibv_device_attr_ex attr;
	uint64_t start;
	bool early;
	int i;

	TRY(!ibv_query_device_ex(dev.ctx, NULL, &attr));
	TRY(attr.cq_mod_caps.max_cq_count >= 8 && attr.cq_mod_caps.max_cq_period == 65535);
	TRY(make(e, IBV_QPT_RC, DEPTH, false, false) && connect_rc(e, e->qp->qp_num));
	/* By count. A guest that was not scheduled for the whole period can not tell. */
	TRY(moderate(e->scq, 4, 65535));
	TRY(!ibv_req_notify_cq(e->scq, 0));
	start = now_us();
	for (i = 0; i < 3; i++)
		TRY(post_write(e, (uint64_t)i));
	early = comp_event(e, 1);
	TRY(!early || now_us() - start >= 65000);
	if (!early) {
		TRY(post_write(e, 3));
		TRY(comp_event(e, WAIT_MS));
	}
	while (ibv_poll_cq(e->scq, 1, &(struct ibv_wc){}) == 1)
		;
	/* By period. */
	for (i = 0; i < 3; i++) {
		TRY(!ibv_req_notify_cq(e->scq, 0));
		start = now_us();
		TRY(post_write(e, 4));
		TRY(comp_event(e, WAIT_MS));
		TRY(now_us() - start >= 65535);
		TRY(completion(e->scq, WAIT_MS, NULL) == IBV_WC_SUCCESS);
	}
	/* Off again. */
	TRY(moderate(e->scq, 0, 0));
	TRY(!ibv_req_notify_cq(e->scq, 0));
	TRY(post_write(e, 5));
	return comp_event(e, WAIT_MS) || fail("no event without moderation");
}

static bool case_overflow(struct end *e)
{
	int i, room;

	TRY(make(e, IBV_QPT_RC, 2, false, false) && connect_rc(e, e->qp->qp_num));
	room = e->scq->cqe;
	TRY(room < DEPTH);
	for (i = 0; i <= room; i++)
		TRY(post_write(e, (uint64_t)i));
	TRY(async_event(IBV_EVENT_CQ_ERR, e->scq, WAIT_MS));
	TRY(async_event(IBV_EVENT_QP_FATAL, e->qp, WAIT_MS));
	TRY(state(e->qp) == IBV_QPS_ERR);
	return true;
}

static bool case_srq_limit(struct end *e)
{
	struct ibv_srq_attr attr = { .srq_limit = 3 };
	int i;

	TRY(make(e, IBV_QPT_RC, DEPTH, true, false) && connect_rc(e, e->qp->qp_num));
	TRY(post_srq(e, 4));
	TRY(!ibv_modify_srq(e->srq, &attr, IBV_SRQ_LIMIT));
	TRY(post_send(e, 0));
	TRY(completion(e->rcq, WAIT_MS, NULL) == IBV_WC_SUCCESS);
	TRY(!async_event(IBV_EVENT_SRQ_LIMIT_REACHED, e->srq, 30));
	TRY(post_send(e, 1));
	TRY(async_event(IBV_EVENT_SRQ_LIMIT_REACHED, e->srq, WAIT_MS));
	TRY(!ibv_query_srq(e->srq, &attr) && attr.srq_limit == 0);
	/* A larger ring keeps what is posted. */
	attr.max_wr = 4 * DEPTH;
	TRY(!ibv_modify_srq(e->srq, &attr, IBV_SRQ_MAX_WR));
	TRY(!ibv_query_srq(e->srq, &attr) && attr.max_wr >= 4 * DEPTH);
	TRY(post_srq(e, 3 * DEPTH));
	TRY(completion(e->rcq, WAIT_MS, NULL) == IBV_WC_SUCCESS);
	for (i = 0; i < 3; i++) {
		TRY(post_send(e, 2));
		TRY(completion(e->rcq, WAIT_MS, NULL) == IBV_WC_SUCCESS);
	}
	return true;
}

static bool case_last_wqe(struct end *e)
{
	TRY(make(e, IBV_QPT_RC, DEPTH, true, false) && connect_rc(e, e->qp->qp_num));
	TRY(post_srq(e, 2));
	TRY(set_state(e->qp, IBV_QPS_ERR, 0, (struct ibv_qp_attr){}));
	return async_event(IBV_EVENT_QP_LAST_WQE_REACHED, e->qp, WAIT_MS) || fail("no event");
}

static bool case_sqd(struct end *e)
{
	struct ibv_qp_init_attr init;
	struct ibv_qp_attr attr;
	uint64_t id;

	TRY(make(e, IBV_QPT_RC, DEPTH, false, false) && connect_rc(e, e->qp->qp_num));
	/* A post and a modify are not ordered: only what has completed has surely begun. */
	TRY(post_write(e, 1));
	TRY(completion(e->scq, WAIT_MS, &id) == IBV_WC_SUCCESS && id == 1);
	TRY(set_state(e->qp, IBV_QPS_SQD, IBV_QP_EN_SQD_ASYNC_NOTIFY,
		      (struct ibv_qp_attr){ .en_sqd_async_notify = 1 }));
	TRY(async_event(IBV_EVENT_SQ_DRAINED, e->qp, WAIT_MS));
	TRY(!ibv_query_qp(e->qp, &attr, IBV_QP_STATE, &init));
	TRY(attr.qp_state == IBV_QPS_SQD && !attr.sq_draining);
	/* What is posted now waits for RTS. */
	TRY(post_write(e, 2));
	TRY(completion(e->scq, 30, NULL) == -1);
	TRY(set_state(e->qp, IBV_QPS_RTS, 0, (struct ibv_qp_attr){}));
	TRY(completion(e->scq, WAIT_MS, &id) == IBV_WC_SUCCESS && id == 2);
	return true;
}

static bool case_sqe(struct end *e)
{
	struct ibv_sge sge = { .addr = (uintptr_t)dev.buf, .length = 8 };
	struct ibv_ah_attr ah_attr = { .is_global = 1, .port_num = 1,
				       .grh = { .dgid = dev.gid,
						.sgid_index = (uint8_t)dev.gid_index,
						.hop_limit = 64 } };
	struct ibv_send_wr wr = { .wr_id = 7, .sg_list = &sge, .num_sge = 1, .opcode = IBV_WR_SEND,
				  .send_flags = IBV_SEND_SIGNALED }, *bad;
	struct ibv_ah *ah;
	bool good;

	TRY(make(e, IBV_QPT_UD, DEPTH, false, false));
	TRY(set_state(e->qp, IBV_QPS_INIT, IBV_QP_PKEY_INDEX | IBV_QP_PORT | IBV_QP_QKEY,
		      (struct ibv_qp_attr){ .port_num = 1, .qkey = 0x1234 }));
	TRY(set_state(e->qp, IBV_QPS_RTR, 0, (struct ibv_qp_attr){}));
	TRY(set_state(e->qp, IBV_QPS_RTS, IBV_QP_SQ_PSN, (struct ibv_qp_attr){}));
	TRY((ah = ibv_create_ah(dev.pd, &ah_attr)));
	wr.wr.ud.ah = ah;
	wr.wr.ud.remote_qpn = e->qp->qp_num;
	wr.wr.ud.remote_qkey = 0x1234;
	sge.lkey = dev.mr->lkey ^ 0x01010100;
	good = !ibv_post_send(e->qp, &wr, &bad) &&
	       completion(e->scq, WAIT_MS, NULL) == IBV_WC_LOC_PROT_ERR &&
	       state(e->qp) == IBV_QPS_SQE;
	sge.lkey = dev.mr->lkey;
	good = good && set_state(e->qp, IBV_QPS_RTS, IBV_QP_CUR_STATE,
				 (struct ibv_qp_attr){ .cur_qp_state = IBV_QPS_SQE }) &&
	       !ibv_post_send(e->qp, &wr, &bad) &&
	       completion(e->scq, WAIT_MS, NULL) == IBV_WC_SUCCESS;
	ibv_destroy_ah(ah);
	return good || fail("state %d", state(e->qp));
}

/* What one process makes and destroys; the number of failures. */
static int churn(const char *name)
{
	struct ibv_srq_init_attr sattr = { .attr = { .max_wr = DEPTH, .max_sge = 1 } };
	struct ibv_qp_init_attr attr = {
		.cap = { .max_send_wr = DEPTH, .max_recv_wr = DEPTH, .max_send_sge = 1,
			 .max_recv_sge = 1 },
		.qp_type = IBV_QPT_RC,
	};
	struct ibv_device **list = ibv_get_device_list(NULL);
	struct ibv_context *ctx = NULL;
	struct ibv_pd *pd;
	int i, failures = 0;

	for (i = 0; list && list[i]; i++)
		if (!strcmp(ibv_get_device_name(list[i]), name))
			ctx = ibv_open_device(list[i]);
	pd = ctx ? ibv_alloc_pd(ctx) : NULL;
	if (!pd)
		return -1;
	for (i = 0; i < 300; i++) {
		struct ibv_cq *cq = ibv_create_cq(ctx, DEPTH, NULL, NULL, 0);
		struct ibv_srq *srq = ibv_create_srq(pd, &sattr);
		struct ibv_qp *qp;

		attr.send_cq = attr.recv_cq = cq;
		qp = cq ? ibv_create_qp(pd, &attr) : NULL;
		failures += !cq + !srq + !qp;
		if (qp)
			ibv_destroy_qp(qp);
		if (srq)
			ibv_destroy_srq(srq);
		if (cq)
			ibv_destroy_cq(cq);
	}
	return failures;
}

/* A number that one process gives back is another's at once: neither may notice. */
static bool case_numbers(struct end *e)
{
	enum { PROCESSES = 3 };
	const char *name = ibv_get_device_name(dev.ctx->device);
	int i, status, bad = 0;
	pid_t pid[PROCESSES];

	memset(e, 0, sizeof(*e));
	for (i = 0; i < PROCESSES; i++) {
		pid[i] = fork();
		TRY(pid[i] >= 0);
		if (!pid[i]) {
			int failures = churn(name);

			_exit(failures < 0 ? 255 : failures > 254 ? 254 : failures);
		}
	}
	for (i = 0; i < PROCESSES; i++) {
		TRY(waitpid(pid[i], &status, 0) == pid[i]);
		TRY(WIFEXITED(status) && WEXITSTATUS(status) != 255);
		bad += WEXITSTATUS(status);
	}
	return !bad || fail("%d objects could not be made", bad);
}

/* A region that is a dma-buf of guest memory: what is written through its key is in the memfd. */
static bool case_dmabuf(struct end *e)
{
	enum { LENGTH = 64 * 1024, AT = 12345 };
	struct udmabuf_create create = { .flags = UDMABUF_FLAGS_CLOEXEC, .size = LENGTH };
	struct ibv_sge sge = { .addr = (uintptr_t)dev.buf, .length = 8, .lkey = dev.mr->lkey };
	struct ibv_send_wr wr = {
		.sg_list = &sge, .num_sge = 1, .opcode = IBV_WR_RDMA_WRITE,
		.send_flags = IBV_SEND_SIGNALED,
	}, *bad;
	int control = open("/dev/udmabuf", O_RDWR | O_CLOEXEC), mem, buf;
	struct ibv_mr *mr;
	char *seen;

	memset(e, 0, sizeof(*e));
	if (control < 0 && errno == ENOENT) {
		/* Kernels without udmabuf (Debian 12): the operation looks for the buffer. */
		mr = ibv_reg_dmabuf_mr(dev.pd, 0, LENGTH, 0, 0, IBV_ACCESS_LOCAL_WRITE);
		return (!mr && errno == EINVAL) || fail("of no dma-buf: %s", strerror(errno));
	}
	TRY(control >= 0);
	TRY((mem = memfd_create("dmabuf", MFD_CLOEXEC | MFD_ALLOW_SEALING)) >= 0);
	TRY(!ftruncate(mem, LENGTH) && !fcntl(mem, F_ADD_SEALS, F_SEAL_SHRINK));
	create.memfd = (uint32_t)mem;
	TRY((buf = ioctl(control, UDMABUF_CREATE, &create)) >= 0);
	close(control);
	TRY((seen = mmap(NULL, LENGTH, PROT_READ | PROT_WRITE, MAP_SHARED, mem, 0)) != MAP_FAILED);
	/* A part of it, at an address of our choice. */
	mr = ibv_reg_dmabuf_mr(dev.pd, 4096, LENGTH - 4096, 0x100000, buf,
			       IBV_ACCESS_LOCAL_WRITE | IBV_ACCESS_REMOTE_WRITE);
	if (!mr)
		return fail("ibv_reg_dmabuf_mr: %s", strerror(errno));
	close(buf);
	TRY(make(e, IBV_QPT_RC, DEPTH, false, false) && connect_rc(e, e->qp->qp_num));
	memcpy(dev.buf, "dma-buf!", 8);
	wr.wr.rdma.remote_addr = 0x100000 + AT;
	wr.wr.rdma.rkey = mr->rkey;
	TRY(!ibv_post_send(e->qp, &wr, &bad));
	TRY(completion(e->scq, WAIT_MS, NULL) == IBV_WC_SUCCESS);
	TRY(!memcmp(seen + 4096 + AT, "dma-buf!", 8));
	TRY(!ibv_dereg_mr(mr));
	/* The key is gone with the region. */
	TRY(!ibv_post_send(e->qp, &wr, &bad));
	TRY(completion(e->scq, WAIT_MS, NULL) == IBV_WC_REM_ACCESS_ERR);
	munmap(seen, LENGTH);
	close(mem);
	return true;
}

static const struct {
	const char *name;
	bool (*run)(struct end *e);
} cases[] = {
	{ "moderation", case_moderation }, { "overflow", case_overflow },
	{ "srq-limit", case_srq_limit },
	{ "last-wqe", case_last_wqe },	   { "sqd", case_sqd },		  { "sqe", case_sqe },
	{ "numbers", case_numbers },	   { "dmabuf", case_dmabuf },
};

static bool open_device(const char *name)
{
	struct ibv_device **list = ibv_get_device_list(NULL);
	int i;

	for (i = 0; list && list[i]; i++)
		if (!strcmp(ibv_get_device_name(list[i]), name))
			dev.ctx = ibv_open_device(list[i]);
	TRY(dev.ctx);
	ibv_free_device_list(list);
	TRY(!fcntl(dev.ctx->async_fd, F_SETFL, O_NONBLOCK));
	TRY((dev.pd = ibv_alloc_pd(dev.ctx)));
	TRY((dev.buf = aligned_alloc(4096, BYTES)));
	TRY((dev.mr = ibv_reg_mr(dev.pd, dev.buf, BYTES,
				 IBV_ACCESS_LOCAL_WRITE | IBV_ACCESS_REMOTE_WRITE)));
	TRY(!ibv_query_gid(dev.ctx, 1, dev.gid_index, &dev.gid));
	return true;
}

static bool wanted(const char *name, char **names)
{
	if (!*names)
		return true;
	for (; *names; names++)
		if (!strcmp(*names, name))
			return true;
	return false;
}

int main(int argc, char **argv)
{
	const char *device = NULL;
	bool all = true;
	size_t i;
	int c;

	while ((c = getopt(argc, argv, "d:g:")) != -1) {
		if (c == 'd')
			device = optarg;
		else if (c == 'g')
			dev.gid_index = atoi(optarg);
		else
			return 2;
	}
	if (!device || !open_device(device)) {
		fprintf(stderr, "usage: vrdma-verbs -d DEVICE -g GID_INDEX [CASE...]\n%s\n",
			dev.why);
		return 2;
	}
	setvbuf(stdout, NULL, _IOLBF, 0);
	for (i = 0; i < sizeof(cases) / sizeof(cases[0]); i++) {
		struct end e;
		bool ok;

		if (!wanted(cases[i].name, argv + optind))
			continue;
		ok = cases[i].run(&e);
		drop(&e);
		all &= ok;
		if (ok)
			printf("ok %s\n", cases[i].name);
		else
			printf("fail %s: %s\n", cases[i].name, dev.why);
	}
	return all ? 0 : 1;
}
