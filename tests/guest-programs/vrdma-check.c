// SPDX-License-Identifier: Apache-2.0 OR MIT
/*
 * vrdma-check: moves data between two machines by RDMA and looks at every byte.
 *
 * perftest measures and checks nothing; this program is the opposite. Each step fills both memories
 * with known patterns, performs one operation (often as several work requests in one post, with
 * scatter-gather lists of odd shapes on both sides) and compares whole images: the bytes that
 * should have changed, and all others, guards around the buffers included. It uses plain
 * libibverbs, so that it runs the same on any device that is to be compared.
 *
 * The server is started first and knows only its device; the client (-c HOST) decides everything
 * and both talk over TCP:
 *
 *     client                           server
 *     step: op, length, shape, seed -> prepares memory, posts receives
 *     performs the operation        <- ready
 *     done                          -> looks at its memory
 *                                   <- verdict
 *
 * For each operation both sides print one JSON line {"op","ok","bytes","seconds"}; exit status 0
 * only if all were verified.
 *
 * Build: gcc -O2 -Wall -Wextra -o vrdma-check vrdma-check.c -libverbs -lpthread
 */
#define _GNU_SOURCE
#include <errno.h>
#include <infiniband/verbs.h>
#include <netdb.h>
#include <netinet/in.h>
#include <poll.h>
#include <pthread.h>
#include <stdarg.h>
#include <stdbool.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <time.h>
#include <unistd.h>

#include "vrdma-check-image.h"

enum { CONTEND = 20, INLINE = 64, WINDOW = 8, TIMEOUT_S = 20, MAX_THREADS = 16 };
enum op { OP_WRITE, OP_WRITE_IMM, OP_READ, OP_SEND, OP_ATOMIC, OP_COUNT };
static const char *const op_names[OP_COUNT] = { "write", "write-imm", "read", "send", "atomic" };

/* Lengths at which implementations break: nothing, odd, around packet, page and segment sizes. */
static const uint32_t lengths[] = {
	0, 1, 3, 7, 8, 63, 64, 65, 255, 1023, 1024, 1025, 2049, 4095, 4096, 4097, 8191, 12289,
	65535, 65536, 65537, 262145, 1048575, 1048576, 1048577
};
enum { NUM_LENGTHS = sizeof(lengths) / sizeof(lengths[0]) };

struct options {
	const char *dev, *host;
	int gid_index, port, ib_port;
	bool events;
	uint32_t max_len, rounds, threads;
	enum op ops[OP_COUNT];
	int num_ops;
};

/* What the client decides for both. */
struct plan {
	uint32_t events, max_len, threads, num_ops;
	uint32_t ops[OP_COUNT];
};

/* What a QP must know of its peer. */
struct peer {
	uint32_t qpn, psn, rkey, mtu, max_sge, reserved;
	uint64_t addr;
	union ibv_gid gid;
};

enum step_kind { STEP_RUN, STEP_END };
struct step {
	uint32_t kind, op, len, shape, with_imm, count;
	uint64_t seed;
};

struct side {
	struct options opt;
	struct plan plan;
	int sock;
	struct ibv_context *ctx;
	struct ibv_pd *pd;
	struct ibv_comp_channel *channel;
	struct ibv_cq *cq;
	struct ibv_qp *qp;
	struct ibv_mr *mr[2];	/* the same memory twice: neighbours in a list use different keys */
	uint8_t *region, *image;
	size_t region_len;
	uint32_t max_inline, max_sge, pieces;	/* pieces: what both sides can put in one list */
	struct peer local, remote;
};

static void complain(const char *format, ...)
{
	va_list args;

	va_start(args, format);
	fprintf(stderr, "vrdma-check: ");
	vfprintf(stderr, format, args);
	fputc('\n', stderr);
	va_end(args);
}

__attribute__((noreturn)) static void die(const char *what)
{
	complain("%s: %s", what, strerror(errno));
	exit(2);
}

static double now(void)
{
	struct timespec t;

	clock_gettime(CLOCK_MONOTONIC, &t);
	return (double)t.tv_sec + (double)t.tv_nsec * 1e-9;
}

/* ---- TCP ------------------------------------------------------------------------------------- */

static void put(struct side *s, const void *data, size_t len)
{
	if (send(s->sock, data, len, MSG_NOSIGNAL) != (ssize_t)len)
		die("the other side is gone");
}

static void get(struct side *s, void *data, size_t len)
{
	errno = ECONNRESET;
	if (recv(s->sock, data, len, MSG_WAITALL) != (ssize_t)len)
		die("the other side is gone");
}

static bool get_bool(struct side *s)
{
	uint32_t v;

	get(s, &v, sizeof(v));
	return v == 1;
}

static void put_bool(struct side *s, bool ok)
{
	uint32_t v = ok;

	put(s, &v, sizeof(v));
}

static int tcp_open(const struct options *opt)
{
	struct addrinfo hints = { .ai_family = AF_INET, .ai_socktype = SOCK_STREAM }, *info;
	int fd = socket(AF_INET, SOCK_STREAM, 0), one = 1, i, conn;
	char service[16];

	snprintf(service, sizeof(service), "%d", opt->port);
	hints.ai_flags = opt->host ? 0 : AI_PASSIVE;
	if (fd < 0 || getaddrinfo(opt->host, service, &hints, &info))
		die("address");
	if (opt->host) {
		/* The server may be a moment late: both are started by scripts. */
		for (i = 0; connect(fd, info->ai_addr, info->ai_addrlen); i++) {
			if (i == 100)
				die("connect");
			usleep(100000);
		}
		conn = fd;
	} else {
		setsockopt(fd, SOL_SOCKET, SO_REUSEADDR, &one, sizeof(one));
		if (bind(fd, info->ai_addr, info->ai_addrlen) || listen(fd, 1))
			die("listen");
		conn = accept(fd, NULL, NULL);
		if (conn < 0)
			die("accept");
		close(fd);
	}
	freeaddrinfo(info);
	return conn;
}

static bool check_image(struct side *s, const struct layout *l, const char *what)
{
	uint32_t i;

	if (!memcmp(s->region, s->image, l->span))
		return true;
	for (i = 0; s->region[i] == s->image[i]; i++)
		;
	complain("%s: byte %u of %u is %02x instead of %02x (%u pieces, first at %u of %u bytes)",
		 what, i, l->span, s->region[i], s->image[i], l->num, l->piece[0].at,
		 l->piece[0].len);
	return false;
}

/* ---- Verbs ----------------------------------------------------------------------------------- */

static bool wait_event(struct side *s)
{
	struct pollfd fd = { .fd = s->channel->fd, .events = POLLIN };
	struct ibv_cq *cq;
	void *context;

	if (poll(&fd, 1, TIMEOUT_S * 1000) != 1 || ibv_get_cq_event(s->channel, &cq, &context))
		return false;
	ibv_ack_cq_events(cq, 1);
	return !ibv_req_notify_cq(s->cq, 0);
}

/*
 * One completion that must be a success; with -e the thread sleeps until the device says that there
 * is one.
 */
static bool wait_wc(struct side *s, struct ibv_wc *wc)
{
	double end = now() + TIMEOUT_S;

	for (;;) {
		int n = ibv_poll_cq(s->cq, 1, wc);

		if (n < 0) {
			complain("ibv_poll_cq failed");
			return false;
		}
		if (n) {
			if (wc->status != IBV_WC_SUCCESS)
				complain("completion: %s (vendor error %u)",
					 ibv_wc_status_str(wc->status), wc->vendor_err);
			return wc->status == IBV_WC_SUCCESS;
		}
		if (s->plan.events ? !wait_event(s) : now() > end) {
			complain("no completion within %d s", TIMEOUT_S);
			return false;
		}
	}
}

static uint32_t fill_sges(struct side *s, const struct layout *l, uint32_t first, uint32_t num,
			  struct ibv_sge *sge)
{
	uint32_t i, bytes = 0;

	for (i = 0; i < num; i++) {
		sge[i].addr = (uintptr_t)s->region + l->piece[first + i].at;
		sge[i].length = l->piece[first + i].len;
		sge[i].lkey = s->mr[i % 2]->lkey;
		bytes += sge[i].length;
	}
	return bytes;
}

static bool post_receive(struct side *s, const struct layout *l)
{
	struct ibv_sge sge[MAX_PIECES];
	struct ibv_recv_wr *bad, wr = { .wr_id = 77, .sg_list = sge, .num_sge = (int)l->num };

	fill_sges(s, l, 0, l->num, sge);
	if (ibv_post_recv(s->qp, &wr, &bad)) {
		complain("ibv_post_recv failed");
		return false;
	}
	return true;
}

static enum ibv_wr_opcode wr_opcode(const struct step *step)
{
	switch (step->op) {
	case OP_READ:
		return IBV_WR_RDMA_READ;
	case OP_SEND:
		return step->with_imm ? IBV_WR_SEND_WITH_IMM : IBV_WR_SEND;
	default:
		return IBV_WR_RDMA_WRITE;
	}
}

/*
 * Posts the step as one list, only the last work request signaled. RDMA messages are cut into up to
 * three requests; the immediate goes with the last.
 */
static bool post_step(struct side *s, const struct step *step, const struct layout *l,
		      uint32_t remote_at)
{
	uint32_t parts = step->op == OP_SEND || l->num < 3 ? 1 : 3, i, first = 0, sent = 0;
	struct ibv_sge sge[MAX_PIECES];
	struct ibv_send_wr wr[3] = {}, *bad;
	int ret;

	for (i = 0; i < parts; i++) {
		uint32_t num = i == parts - 1 ? l->num - first : l->num / parts;
		uint32_t bytes = fill_sges(s, l, first, num, &sge[first]);

		wr[i].wr_id = step->seed + i;
		wr[i].sg_list = &sge[first];
		wr[i].num_sge = (int)num;
		wr[i].opcode = wr_opcode(step);
		wr[i].wr.rdma.remote_addr = s->remote.addr + remote_at + sent;
		wr[i].wr.rdma.rkey = s->remote.rkey;
		if (step->op != OP_READ && bytes <= s->max_inline && step->seed & 1)
			wr[i].send_flags |= IBV_SEND_INLINE;
		wr[i].next = i == parts - 1 ? NULL : &wr[i + 1];
		first += num;
		sent += bytes;
	}
	wr[parts - 1].send_flags |= IBV_SEND_SIGNALED;
	wr[parts - 1].imm_data = htobe32((uint32_t)step->seed);
	if (step->op == OP_WRITE_IMM)
		wr[parts - 1].opcode = IBV_WR_RDMA_WRITE_WITH_IMM;
	ret = ibv_post_send(s->qp, wr, &bad);
	if (ret)
		complain("ibv_post_send: %s", strerror(ret));
	return !ret;
}

static void make_qp(struct side *s)
{
	struct ibv_qp_init_attr init = {
		.send_cq = s->cq,
		.recv_cq = s->cq,
		.qp_type = IBV_QPT_RC,
		.cap = { .max_send_wr = 2 * WINDOW, .max_recv_wr = 4, .max_send_sge = s->max_sge,
			 .max_recv_sge = s->max_sge, .max_inline_data = INLINE },
	};

	s->qp = ibv_create_qp(s->pd, &init);
	if (!s->qp) {
		init.cap.max_inline_data = 0;
		s->qp = ibv_create_qp(s->pd, &init);
	}
	if (!s->qp)
		die("ibv_create_qp");
	s->max_inline = init.cap.max_inline_data;
	s->local.qpn = s->qp->qp_num;
	s->local.psn = (uint32_t)mix((uint64_t)getpid() << 32 | s->qp->qp_num) & 0xffffff;
}

static void connect_qp(struct side *s)
{
	struct ibv_qp_attr attr = {
		.qp_state = IBV_QPS_INIT,
		.port_num = (uint8_t)s->opt.ib_port,
		.qp_access_flags = IBV_ACCESS_REMOTE_WRITE | IBV_ACCESS_REMOTE_READ |
				   IBV_ACCESS_REMOTE_ATOMIC,
	};

	if (ibv_modify_qp(s->qp, &attr, IBV_QP_STATE | IBV_QP_PKEY_INDEX | IBV_QP_PORT |
			  IBV_QP_ACCESS_FLAGS))
		die("ibv_modify_qp to INIT");
	put(s, &s->local, sizeof(s->local));
	get(s, &s->remote, sizeof(s->remote));
	s->pieces = s->remote.max_sge < s->max_sge ? s->remote.max_sge : s->max_sge;
	attr = (struct ibv_qp_attr){
		.qp_state = IBV_QPS_RTR,
		.path_mtu = s->remote.mtu < s->local.mtu ? s->remote.mtu : s->local.mtu,
		.dest_qp_num = s->remote.qpn,
		.rq_psn = s->remote.psn,
		.max_dest_rd_atomic = WINDOW,
		.min_rnr_timer = 12,
		.ah_attr = { .is_global = 1, .port_num = (uint8_t)s->opt.ib_port,
			     .grh = { .dgid = s->remote.gid,
				      .sgid_index = (uint8_t)s->opt.gid_index, .hop_limit = 64 } },
	};
	if (ibv_modify_qp(s->qp, &attr, IBV_QP_STATE | IBV_QP_AV | IBV_QP_PATH_MTU |
			  IBV_QP_DEST_QPN | IBV_QP_RQ_PSN | IBV_QP_MAX_DEST_RD_ATOMIC |
			  IBV_QP_MIN_RNR_TIMER))
		die("ibv_modify_qp to RTR");
	attr = (struct ibv_qp_attr){ .qp_state = IBV_QPS_RTS, .timeout = 16, .retry_cnt = 7,
				     .rnr_retry = 7, .sq_psn = s->local.psn,
				     .max_rd_atomic = WINDOW };
	if (ibv_modify_qp(s->qp, &attr, IBV_QP_STATE | IBV_QP_TIMEOUT | IBV_QP_RETRY_CNT |
			  IBV_QP_RNR_RETRY | IBV_QP_SQ_PSN | IBV_QP_MAX_QP_RD_ATOMIC))
		die("ibv_modify_qp to RTS");
	put_bool(s, true);
	get_bool(s);
}

static void open_device(struct side *s)
{
	struct ibv_device **list = ibv_get_device_list(NULL);
	struct ibv_device_attr dev;
	struct ibv_port_attr port;
	int i;

	for (i = 0; list && list[i] && !s->ctx; i++) {
		if (!s->opt.dev || !strcmp(ibv_get_device_name(list[i]), s->opt.dev))
			s->ctx = ibv_open_device(list[i]);
	}
	errno = ENODEV;
	if (!s->ctx || ibv_query_device(s->ctx, &dev) ||
	    ibv_query_port(s->ctx, (uint8_t)s->opt.ib_port, &port) ||
	    ibv_query_gid(s->ctx, (uint8_t)s->opt.ib_port, s->opt.gid_index, &s->local.gid))
		die("no such device, port or GID");
	ibv_free_device_list(list);
	s->max_sge = dev.max_sge < MAX_PIECES ? (uint32_t)dev.max_sge : MAX_PIECES;
	s->local.max_sge = s->max_sge;
	s->local.mtu = port.active_mtu;
	s->pd = ibv_alloc_pd(s->ctx);
	s->channel = ibv_create_comp_channel(s->ctx);
	s->cq = s->pd && s->channel ? ibv_create_cq(s->ctx, 64, NULL, s->channel, 0) : NULL;
	if (!s->cq || (s->plan.events && ibv_req_notify_cq(s->cq, 0)))
		die("ibv_create_cq");
}

static void open_memory(struct side *s)
{
	int access = IBV_ACCESS_LOCAL_WRITE | IBV_ACCESS_REMOTE_WRITE | IBV_ACCESS_REMOTE_READ |
		     IBV_ACCESS_REMOTE_ATOMIC;
	int i;

	s->region_len = (size_t)s->plan.max_len + 2 * GUARD + MAX_PIECES * MAX_GAP;
	if (posix_memalign((void **)&s->region, 4096, s->region_len))
		die("memory");
	s->image = malloc(s->region_len);
	for (i = 0; i < 2; i++) {
		s->mr[i] = ibv_reg_mr(s->pd, s->region, s->region_len, access);
		if (!s->mr[i] || !s->image)
			die("ibv_reg_mr");
	}
	s->local.rkey = s->mr[0]->rkey;
	s->local.addr = (uintptr_t)s->region;
}

/* ---- WRITE, WRITE_WITH_IMM, READ, SEND ------------------------------------------------------- */

/*
 * Where the server's memory takes or gives the message: one piece for RDMA, scattered for receives.
 */
static struct layout server_layout(struct side *s, const struct step *step)
{
	return make_layout(step->len, step->op == OP_SEND ? (step->shape + 1) % NUM_SHAPES : 0,
			   step->seed + 7, s->pieces);
}

static bool client_step(struct side *s, const struct step *step)
{
	struct layout l = make_layout(step->len, step->shape, step->seed, s->pieces);
	struct layout there = server_layout(s, step);
	bool ready, ok, verdict;
	struct ibv_wc wc;

	place_background(s->region, &l, step->seed);
	memcpy(s->image, s->region, l.span);
	place_message(s->image, &l, step->seed);
	if (step->op != OP_READ)
		memcpy(s->region, s->image, l.span);
	put(s, step, sizeof(*step));
	ready = get_bool(s);
	ok = ready && post_step(s, step, &l, there.piece[0].at) && wait_wc(s, &wc) &&
	     check_image(s, &l, op_names[step->op]);
	put_bool(s, ok);
	verdict = get_bool(s);
	return ok && verdict;
}

static bool check_receive(struct side *s, const struct step *step)
{
	bool imm = step->op == OP_WRITE_IMM || step->with_imm;
	struct ibv_wc wc = {};

	if (!wait_wc(s, &wc))
		return false;
	if (wc.wr_id == 77 && wc.byte_len == step->len && wc.qp_num == s->qp->qp_num &&
	    wc.opcode == (step->op == OP_SEND ? IBV_WC_RECV : IBV_WC_RECV_RDMA_WITH_IMM) &&
	    !!(wc.wc_flags & IBV_WC_WITH_IMM) == imm &&
	    (!imm || be32toh(wc.imm_data) == (uint32_t)step->seed))
		return true;
	complain("receive completion: wr_id %llu, opcode %d, %u bytes of %u, flags %x, "
		 "immediate %x instead of %x", (unsigned long long)wc.wr_id, wc.opcode, wc.byte_len,
		 step->len, wc.wc_flags, be32toh(wc.imm_data), (uint32_t)step->seed);
	return false;
}

static bool server_step(struct side *s, const struct step *step)
{
	struct layout l = server_layout(s, step), none = { .span = 0 };
	bool ok = true, done;

	place_background(s->region, &l, step->seed + 1);
	memcpy(s->image, s->region, l.span);
	if (step->op == OP_READ)
		place_message(s->region, &l, step->seed);
	place_message(s->image, &l, step->seed);
	if (step->op == OP_SEND)
		ok = post_receive(s, &l);
	else if (step->op == OP_WRITE_IMM)
		ok = post_receive(s, &none);
	put_bool(s, ok);
	done = get_bool(s);
	if (ok && done && (step->op == OP_SEND || step->op == OP_WRITE_IMM)) {
		/*
		 * A write with immediate is in several parts: its completion counts the bytes of
		 * the last only.
		 */
		struct step last = *step;
		struct layout cut = make_layout(step->len, step->shape, step->seed, s->pieces);

		if (step->op == OP_WRITE_IMM && cut.num >= 3) {
			uint32_t i;

			for (i = 0, last.len = 0; i < cut.num - 2 * (cut.num / 3); i++)
				last.len += cut.piece[cut.num - 1 - i].len;
		}
		ok = check_receive(s, &last);
	}
	ok = ok && done && check_image(s, &l, op_names[step->op]);
	put_bool(s, ok);
	return ok;
}

#include "vrdma-check-atomic.h"

/* ---- Both sides ------------------------------------------------------------------------------ */

static void report(enum op op, bool ok, uint64_t bytes, double start)
{
	printf("{\"op\":\"%s\",\"ok\":%s,\"bytes\":%llu,\"seconds\":%.6f}\n", op_names[op],
	       ok ? "true" : "false", (unsigned long long)bytes, now() - start);
	fflush(stdout);
}

static bool client_op(struct side *s, enum op op)
{
	struct step step = { .kind = STEP_RUN, .op = op, .seed = mix(op + 1) };
	uint64_t bytes = 0;
	double start = now();
	bool ok = true;
	uint32_t n;

	if (op == OP_ATOMIC) {
		step.count = 300 * s->opt.rounds;
		ok = client_atomic(s, &step);
		bytes = 8ull * ((1 + CONTEND) * step.count + 1);
	}
	for (n = 0; ok && op != OP_ATOMIC && n < s->opt.rounds * NUM_LENGTHS * NUM_SHAPES; n++) {
		step.len = lengths[n / NUM_SHAPES % NUM_LENGTHS];
		step.shape = n % NUM_SHAPES;
		step.with_imm = op == OP_SEND && n / 2 % 2;
		step.seed = mix(step.seed + n);
		if (step.len > s->opt.max_len)
			continue;
		ok = client_step(s, &step);
		bytes += step.len;
		if (!ok)
			complain("%s of %u bytes in shape %u failed", op_names[op], step.len,
				 step.shape);
	}
	step.kind = STEP_END;
	put(s, &step, sizeof(step));
	report(op, ok, bytes, start);
	return ok;
}

static bool server_op(struct side *s, enum op op)
{
	uint64_t bytes = 0;
	double start = now();
	struct step step;
	bool ok = true;

	for (;;) {
		get(s, &step, sizeof(step));
		if (step.kind == STEP_END)
			break;
		ok &= op == OP_ATOMIC ? server_atomic(s, &step) : server_step(s, &step);
		bytes += op == OP_ATOMIC ? 8ull * ((1 + CONTEND) * step.count + 1) : step.len;
	}
	report(op, ok, bytes, start);
	return ok;
}

static bool run(struct side *s)
{
	bool ok = true;
	uint32_t i;

	for (i = 0; i < s->plan.num_ops; i++) {
		struct ibv_wc wc;

		make_qp(s);
		connect_qp(s);
		ok &= s->opt.host ? client_op(s, s->plan.ops[i]) : server_op(s, s->plan.ops[i]);
		if (ibv_destroy_qp(s->qp))
			die("ibv_destroy_qp");
		while (ibv_poll_cq(s->cq, 1, &wc) > 0)
			;
	}
	return ok;
}

static void close_all(struct side *s)
{
	if (ibv_dereg_mr(s->mr[0]) || ibv_dereg_mr(s->mr[1]) || ibv_destroy_cq(s->cq) ||
	    ibv_destroy_comp_channel(s->channel) || ibv_dealloc_pd(s->pd) ||
	    ibv_close_device(s->ctx))
		die("closing");
	free(s->image);
	free(s->region);
	close(s->sock);
}

__attribute__((noreturn)) static void usage(void)
{
	fprintf(stderr,
		"usage: vrdma-check [-d device] [-g gid-index] [-i port] [-p tcp-port]"
		"                  (server)\n"
		"       vrdma-check -c host [the same] [-s max-bytes] [-n rounds] [-e] [-t threads]"
		" op...  (client)\n"
		"  op: write write-imm read send atomic "
		"     -e: wait for events instead of polling\n"
		"  -t: threads of the server that add to the word of FETCH_ADD (needs two CPUs"
		" there, and\n"
		"      a device whose atomics are atomic against the CPU)\n");
	exit(2);
}

static void parse_ops(struct options *opt, char **names)
{
	for (; *names; names++) {
		int op = 0;

		while (op < OP_COUNT && strcmp(*names, op_names[op]))
			op++;
		if (op == OP_COUNT || opt->num_ops == OP_COUNT)
			usage();
		opt->ops[opt->num_ops++] = op;
	}
}

static void parse(struct options *opt, int argc, char **argv)
{
	int c;

	*opt = (struct options){ .gid_index = 1, .port = 18600, .ib_port = 1, .max_len = 1048577,
				 .rounds = 1 };
	while ((c = getopt(argc, argv, "d:c:g:i:p:s:n:t:e")) != -1) {
		unsigned long v = optarg ? strtoul(optarg, NULL, 0) : 0;

		switch (c) {
		case 'd': opt->dev = optarg; break;
		case 'c': opt->host = optarg; break;
		case 'g': opt->gid_index = (int)v; break;
		case 'i': opt->ib_port = (int)v; break;
		case 'p': opt->port = (int)v; break;
		case 's': opt->max_len = (uint32_t)v; break;
		case 'n': opt->rounds = (uint32_t)v; break;
		case 't': opt->threads = (uint32_t)v; break;
		case 'e': opt->events = true; break;
		default: usage();
		}
	}
	parse_ops(opt, argv + optind);
	if (!opt->host != !opt->num_ops || opt->threads > MAX_THREADS || !opt->rounds)
		usage();
}

static void exchange_plan(struct side *s)
{
	int i;

	if (s->opt.host) {
		s->plan = (struct plan){ .events = s->opt.events, .max_len = s->opt.max_len,
					 .threads = s->opt.threads,
					 .num_ops = (uint32_t)s->opt.num_ops };
		for (i = 0; i < s->opt.num_ops; i++)
			s->plan.ops[i] = s->opt.ops[i];
		put(s, &s->plan, sizeof(s->plan));
	} else {
		get(s, &s->plan, sizeof(s->plan));
	}
	if (!s->opt.host && s->plan.threads && sysconf(_SC_NPROCESSORS_ONLN) < 2) {
		complain("contention with a CPU needs two CPUs");
		exit(2);
	}
}

int main(int argc, char **argv)
{
	struct side s = {};
	bool ok;

	parse(&s.opt, argc, argv);
	s.sock = tcp_open(&s.opt);
	exchange_plan(&s);
	open_device(&s);
	open_memory(&s);
	ok = run(&s);
	close_all(&s);
	return ok ? 0 : 1;
}
