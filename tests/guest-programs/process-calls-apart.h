// SPDX-License-Identifier: Apache-2.0 OR MIT
/*
 * process-calls: what a program does with its descriptors and threads is its own affair.
 *
 * A number that the program has closed may be another file of its own: nothing of the device's is
 * written there, ended there or cut out of it. A thread that is cancelled leaves nothing locked
 * behind: no call but those that wait for events is a point of cancellation, as none is with the
 * kernel, where they are stores and ioctl(2) (pthreads(7)).
 */
#include <infiniband/verbs.h>
#include <sys/mman.h>
#include <sys/socket.h>

enum { FIRST_FD = 3, SOME_FDS = 64, FILE_BYTES = 17 << 20 };

struct pair {
	struct ibv_context *context;
	struct ibv_pd *pd;
	struct ibv_cq *cq;
	struct ibv_qp *qp;
	struct ibv_ah *ah;
};

static struct ibv_qp *make_one(const struct pair *pair)
{
	struct ibv_qp_init_attr attr = {
		.send_cq = pair->cq,
		.recv_cq = pair->cq,
		.cap = { 16, 16, 1, 1, 0 },
		.qp_type = IBV_QPT_UD,
	};
	struct ibv_qp *qp = ibv_create_qp(pair->pd, &attr);

	MUST(qp);
	return qp;
}

static void ready_to_send(const struct pair *pair)
{
	struct ibv_qp_attr attr = { .qp_state = IBV_QPS_INIT, .port_num = 1, .qkey = 1 };

	MUST(!ibv_modify_qp(pair->qp, &attr, IBV_QP_STATE | IBV_QP_PKEY_INDEX | IBV_QP_PORT |
					     IBV_QP_QKEY));
	attr.qp_state = IBV_QPS_RTR;
	MUST(!ibv_modify_qp(pair->qp, &attr, IBV_QP_STATE));
	attr.qp_state = IBV_QPS_RTS;
	MUST(!ibv_modify_qp(pair->qp, &attr, IBV_QP_STATE | IBV_QP_SQ_PSN));
}

static struct pair make_pair(void)
{
	struct pair pair = { .context = open_device() };
	struct ibv_ah_attr own = { .is_global = 1, .port_num = 1 };

	MUST(pair.pd = ibv_alloc_pd(pair.context));
	MUST(pair.cq = ibv_create_cq(pair.context, 64, NULL, NULL, 0));
	pair.qp = make_one(&pair);
	ready_to_send(&pair);
	MUST(!ibv_query_gid(pair.context, 1, 0, &own.grh.dgid));
	MUST(pair.ah = ibv_create_ah(pair.pd, &own));
	return pair;
}

/* To the queue pair itself. */
static void post_one(const struct pair *pair)
{
	struct ibv_send_wr *bad, wr = { .opcode = IBV_WR_SEND };

	wr.wr.ud.ah = pair->ah;
	wr.wr.ud.remote_qpn = pair->qp->qp_num;
	wr.wr.ud.remote_qkey = 1;
	MUST(!ibv_post_send(pair->qp, &wr, &bad));
}

static void end_pair(const struct pair *pair)
{
	MUST(!ibv_destroy_ah(pair->ah));
	MUST(!ibv_destroy_qp(pair->qp));
	MUST(!ibv_destroy_cq(pair->cq));
	MUST(!ibv_dealloc_pd(pair->pd));
	MUST(!ibv_close_device(pair->context));
}

/* ---- Descriptors ----------------------------------------------------------------------------- */

/* All numbers are this file from now on. */
static void fill_numbers(int fd)
{
	int high = fcntl(fd, F_DUPFD, FIRST_FD + SOME_FDS);

	MUST(high >= 0);
	for (int at = FIRST_FD; at < FIRST_FD + SOME_FDS; at++)
		MUST(dup2(high, at) == at);
	close(high);
}

static void close_numbers(void)
{
	for (int at = FIRST_FD; at < FIRST_FD + SOME_FDS; at++)
		close(at);
}

/* Room for descriptors of the library's; the lowest half stays the program's. */
static void close_upper_half(void)
{
	for (int at = FIRST_FD + SOME_FDS / 2; at < FIRST_FD + SOME_FDS; at++)
		close(at);
}

static int full_file(void)
{
	int fd = memfd_create("of-the-program", 0);
	uint8_t *bytes;

	MUST(fd >= 0 && !ftruncate(fd, FILE_BYTES));
	bytes = mmap(NULL, FILE_BYTES, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
	MUST(bytes != MAP_FAILED);
	memset(bytes, 0xab, FILE_BYTES);
	munmap(bytes, FILE_BYTES);
	return fd;
}

static void must_be_full(void)
{
	uint8_t *bytes = mmap(NULL, FILE_BYTES, PROT_READ, MAP_SHARED, FIRST_FD, 0);

	MUST(bytes != MAP_FAILED);
	for (size_t i = 0; i < FILE_BYTES; i++)
		if (bytes[i] != 0xab)
			fail("byte %zu of the program's file is %#x", i, bytes[i]);
	munmap(bytes, FILE_BYTES);
}

static void must_be_open(int upto)
{
	int status;
	pid_t pid = fork();

	if (!pid) {
		for (int at = FIRST_FD; at < upto; at++)
			if (fcntl(at, F_GETFD) < 0)
				_exit(1);
		_exit(0);
	}
	MUST(pid > 0 && waitpid(pid, &status, 0) == pid);
	if (status)
		fail("a child lacks descriptors of its parent's");
}

/* A program that has ended with the device, and closes what it does not know (closefrom(3)). */
static void closes_between(void)
{
	struct pair pair = make_pair();

	end_pair(&pair);
	close_numbers();
	fill_numbers(full_file());
	must_be_open(FIRST_FD + SOME_FDS);
	close_upper_half();
	for (int i = 0; i < 2; i++) {
		pair = make_pair();
		end_pair(&pair);
		must_be_full();
		must_be_open(FIRST_FD + SOME_FDS / 2);
	}
}

/* One that does so with the device open: that is gone, and nothing else is. */
static void closes_under(void)
{
	struct pair pair = make_pair();
	struct ibv_device_attr attr;
	char byte;
	int fds[2];

	MUST(!socketpair(AF_UNIX, SOCK_SEQPACKET | SOCK_NONBLOCK, 0, fds));
	MUST((fds[1] = fcntl(fds[1], F_DUPFD, FIRST_FD + SOME_FDS)) >= 0);
	fill_numbers(fds[0]);
	alarm(20);
	MUST(ibv_destroy_qp(pair.qp));
	/* Whether or not it is sent. */
	for (int i = 0; i < 4; i++) {
		usleep(100000);
		post_one(&pair);
	}
	(void)ibv_query_device(pair.context, &attr);
	must_be_open(FIRST_FD + SOME_FDS);
	(void)ibv_close_device(pair.context);
	errno = 0;
	MUST(recv(fds[1], &byte, 1, MSG_DONTWAIT) < 0 && errno == EAGAIN);
}

/* The same, where the numbers are a file. */
static void closes_for_file(void)
{
	struct pair pair = make_pair();

	close_numbers();
	fill_numbers(full_file());
	alarm(20);
	usleep(100000);
	post_one(&pair);
	(void)ibv_destroy_qp(pair.qp);
	(void)ibv_destroy_cq(pair.cq);
	must_be_full();
	(void)ibv_close_device(pair.context);
	must_be_full();
}

/* ---- Threads --------------------------------------------------------------------------------- */

struct call {
	void (*it)(struct pair *pair);
	struct pair *pair;
	bool returned;
};

static void *cancelled(void *arg)
{
	struct call *call = arg;
	int before;

	/* It is acted upon in the next point of cancellation. */
	pthread_setcancelstate(PTHREAD_CANCEL_DISABLE, &before);
	pthread_cancel(pthread_self());
	pthread_setcancelstate(before, NULL);
	call->it(call->pair);
	call->returned = true;
	pthread_testcancel();
	return NULL;
}

static void is_no_point(const char *name, void (*it)(struct pair *pair), struct pair *pair)
{
	struct call call = { it, pair, false };
	pthread_t thread;

	MUST(!pthread_create(&thread, NULL, cancelled, &call));
	MUST(!pthread_join(thread, NULL));
	if (!call.returned)
		fail("%s is a point of cancellation", name);
}

/* The device goes to sleep between posts, and has to be woken. */
static void post_now_and_then(struct pair *pair)
{
	struct timespec begin, now;

	for (int i = 0; i < 3; i++) {
		clock_gettime(CLOCK_MONOTONIC, &begin);
		/* nanosleep(2) is a point of cancellation. */
		do
			clock_gettime(CLOCK_MONOTONIC, &now);
		while ((now.tv_sec - begin.tv_sec) * 1000 +
			       (now.tv_nsec - begin.tv_nsec) / 1000000 < A_WHILE_MS);
		post_one(pair);
	}
}

static void make_and_end(struct pair *pair)
{
	MUST(!ibv_destroy_qp(make_one(pair)));
}

static void register_it(struct pair *pair)
{
	static char bytes[1 << 16];
	struct ibv_mr *mr = ibv_reg_mr(pair->pd, bytes, sizeof(bytes), IBV_ACCESS_LOCAL_WRITE);

	MUST(mr);
	MUST(!ibv_dereg_mr(mr));
}

static void register_file(struct pair *pair)
{
	int fd = memfd_create("of-the-program", 0);
	void *bytes;
	struct ibv_mr *mr;

	MUST(fd >= 0 && !ftruncate(fd, 1 << 16));
	bytes = mmap(NULL, 1 << 16, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
	MUST(bytes != MAP_FAILED);
	MUST(mr = ibv_reg_mr(pair->pd, bytes, 1 << 16, IBV_ACCESS_LOCAL_WRITE));
	MUST(!ibv_dereg_mr(mr));
	munmap(bytes, 1 << 16);
}

static void cancels(void)
{
	struct pair pair = make_pair();

	alarm(60);
	is_no_point("ibv_post_send()", post_now_and_then, &pair);
	is_no_point("ibv_destroy_qp()", make_and_end, &pair);
	is_no_point("ibv_reg_mr()", register_it, &pair);
	is_no_point("ibv_reg_mr() of a file", register_file, &pair);
	/* And nothing is locked. */
	post_now_and_then(&pair);
	make_and_end(&pair);
	register_it(&pair);
	register_file(&pair);
	end_pair(&pair);
}
