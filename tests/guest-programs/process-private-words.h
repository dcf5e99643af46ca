/* SPDX-License-Identifier: Apache-2.0 OR MIT */
/*
 * Cases of process-private.c: words that one side looks at while the other changes them. What one
 * aligned load of eight bytes or less finds is never of two messages in part, as from an adapter.
 */

#include <linux/audit.h>
#include <linux/filter.h>
#include <linux/seccomp.h>
#include <stddef.h>
#include <sys/prctl.h>

/* How long each is tried, requests that are posted at once, and where their bytes are here. */
enum { WORD_MS = 400, AT_ONCE = 32, APART = 256 };

/* All bytes of a word are the same, or it is of two messages. */
static bool is_whole(uint64_t word, size_t len)
{
	uint64_t all = 0x0101010101010101ull * (word & 0xff);

	return !((word ^ all) << (64 - 8 * len));
}

static uint64_t load_word(const uint8_t *at, size_t len)
{
	const void *word = at;

	switch (len) {
	case 8:
		return __atomic_load_n((const uint64_t *)word, __ATOMIC_ACQUIRE);
	case 4:
		return __atomic_load_n((const uint32_t *)word, __ATOMIC_ACQUIRE);
	default:
		return __atomic_load_n((const uint16_t *)word, __ATOMIC_ACQUIRE);
	}
}

static void store_word(uint8_t *at, size_t len, uint64_t value)
{
	void *word = at;

	switch (len) {
	case 8:
		__atomic_store_n((uint64_t *)word, value, __ATOMIC_RELEASE);
		break;
	case 4:
		__atomic_store_n((uint32_t *)word, (uint32_t)value, __ATOMIC_RELEASE);
		break;
	default:
		__atomic_store_n((uint16_t *)word, (uint16_t)value, __ATOMIC_RELEASE);
	}
}

/* A word that a thread looks at, or changes, until it is told to end. */
struct watched {
	uint8_t *at;
	size_t len;
	bool changes;
	int ends;
	uint64_t torn;
};

static void *watch(void *arg)
{
	struct watched *of = arg;
	uint64_t word;

	for (word = 0; !__atomic_load_n(&of->ends, __ATOMIC_RELAXED); word++) {
		if (of->changes) {
			store_word(of->at, of->len, 0x0101010101010101ull * (word & 0xff));
			continue;
		}
		word = load_word(of->at, of->len);
		if (!is_whole(word, of->len))
			of->torn = word;
	}
	return NULL;
}

/* Some requests at once, to or from one place; of a read each word that it brought is whole. */
static bool try_words(enum ibv_wr_opcode op, struct ibv_mr *near_mr, struct remote there,
		      size_t all, struct watched *of)
{
	struct ibv_wc wc;
	uint64_t word;
	int i;

	for (i = 0; i < AT_ONCE; i++) {
		uint8_t *at = bss[0] + APART * i;

		if (op == IBV_WR_RDMA_WRITE)
			memset(at, at[0] + i, all);
		MUST(post(op, i + 1 < AT_ONCE ? 0 : IBV_SEND_SIGNALED,
			  sge(at, (uint32_t)all, near_mr), there));
	}
	MUST(done(&ends[0], &wc, IBV_WC_SUCCESS));
	for (i = 0; i < AT_ONCE && op == IBV_WR_RDMA_READ; i++) {
		word = load_word(bss[0] + APART * i + all - of->len, of->len);
		if (!is_whole(word, of->len))
			of->torn = word;
	}
	return true;
}

/* One operation again and again, beside a thread that has the last word of the far memory. */
static bool beside(enum ibv_wr_opcode op, struct ibv_mr *near_mr, struct ibv_mr *far_mr,
		   size_t before, size_t len)
{
	struct watched of = { bss[1] + 64 + before, len, op == IBV_WR_RDMA_READ, 0, 0 };
	struct remote there = { bss[1] + 64, far_mr, 0, 0 };
	double end = now() + WORD_MS / 1e3;
	pthread_t thread;
	bool good = true;

	memset(bss[0], 0, ROOM);
	memset(bss[1], 0, ROOM);
	TRY(!pthread_create(&thread, NULL, watch, &of));
	while (good && now() < end)
		good = try_words(op, near_mr, there, before + len, &of);
	__atomic_store_n(&of.ends, 1, __ATOMIC_RELAXED);
	pthread_join(thread, NULL);
	MUST(good);
	if (of.torn)
		return fail("%s of %zu bytes: the last %zu are %#llx",
			    op == IBV_WR_RDMA_READ ? "a read" : "a write", before + len, len,
			    (unsigned long long)of.torn);
	return true;
}

static bool all_words(void)
{
	struct ibv_mr *near_mr = ibv_reg_mr(ends[0].pd, bss[0], ROOM, ALL);
	struct ibv_mr *far_mr = ibv_reg_mr(ends[1].pd, bss[1], ROOM, ALL);
	size_t len;

	TRY(near_mr && far_mr && !((uintptr_t)bss[1] % 8));
	MUST(make(IBV_QPT_RC, false, false));
	for (len = 2; len <= 8; len *= 2) {
		MUST(beside(IBV_WR_RDMA_WRITE, near_mr, far_mr, 0, len));
		MUST(beside(IBV_WR_RDMA_WRITE, near_mr, far_mr, 16, len));
		MUST(beside(IBV_WR_RDMA_READ, near_mr, far_mr, 0, len));
	}
	TRY(!ibv_dereg_mr(near_mr) && !ibv_dereg_mr(far_mr));
	return true;
}

/* As in a container whose filter does not let a process copy to another, nor to itself. */
static bool filter_copies(void)
{
	struct sock_filter rules[] = {
		BPF_STMT(BPF_LD | BPF_W | BPF_ABS, offsetof(struct seccomp_data, nr)),
		BPF_JUMP(BPF_JMP | BPF_JEQ | BPF_K, SYS_process_vm_readv, 1, 0),
		BPF_JUMP(BPF_JMP | BPF_JEQ | BPF_K, SYS_process_vm_writev, 0, 1),
		BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_ERRNO | EPERM),
		BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_ALLOW),
	};
	struct sock_fprog program = { sizeof(rules) / sizeof(rules[0]), rules };

	TRY(!prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0));
	TRY(!syscall(SYS_seccomp, SECCOMP_SET_MODE_FILTER, SECCOMP_FILTER_FLAG_TSYNC, &program));
	return true;
}

/* By name only: it is for the rest of the process. */
static bool words_filtered(void)
{
	return filter_copies() && all_words() && operate(bss[0], bss[1]);
}

/* The same in a process of its own whose calls are filtered, as a program of its own. */
static bool whole_words(void)
{
	const char *near = ibv_get_device_name(ends[0].ctx->device);
	const char *far = ibv_get_device_name(ends[1].ctx->device);
	int status;
	pid_t pid;

	MUST(all_words());
	pid = fork();
	if (!pid) {
		execl("/proc/self/exe", "process-private", near, far, "words-filtered", NULL);
		_exit(9);
	}
	TRY(pid > 0 && waitpid(pid, &status, 0) == pid && WIFEXITED(status) &&
	    !WEXITSTATUS(status));
	return true;
}

/* ---- What a peer writes beside what is read and sent ----------------------------------------- */

struct writer {
	const struct ibv_mr *near_mr, *far_mr;
	int ends;
	uint64_t lost;
};

enum { WRITTEN = 3008, FROM = 8000 };

/* A word of the near memory, again and again: it is there when its write is complete. */
static void *write_beside(void *arg)
{
	struct writer *of = arg;
	struct ibv_sge list = sge(bss[1] + FROM, 8, of->far_mr);
	struct ibv_send_wr *bad, wr = {
		.sg_list = &list, .num_sge = 1, .opcode = IBV_WR_RDMA_WRITE,
		.send_flags = IBV_SEND_SIGNALED,
	};
	struct ibv_wc wc;
	uint64_t i;

	wr.wr.rdma.remote_addr = (uintptr_t)bss[0] + WRITTEN;
	wr.wr.rdma.rkey = of->near_mr->rkey;
	for (i = 1; !__atomic_load_n(&of->ends, __ATOMIC_RELAXED) && !of->lost; i++) {
		store_word(bss[1] + FROM, 8, i);
		if (ibv_post_send(ends[1].qp, &wr, &bad) || next(&ends[1], &wc) ||
		    load_word(bss[0] + WRITTEN, 8) != i)
			of->lost = i;
	}
	return NULL;
}

/* A fenced request takes what a read brings, and beside it what a peer writes at that time. */
static bool fenced_beside(void)
{
	struct ibv_mr *near_mr = ibv_reg_mr(ends[0].pd, bss[0], ROOM, ALL);
	struct ibv_mr *far_mr = ibv_reg_mr(ends[1].pd, bss[1], ROOM, ALL);
	struct writer of = { near_mr, far_mr, 0, 0 };
	double end = now() + WORD_MS / 1e3;
	struct ibv_wc wc;
	pthread_t thread;
	bool good = true;

	TRY(near_mr && far_mr);
	MUST(make(IBV_QPT_RC, false, false));
	TRY(!pthread_create(&thread, NULL, write_beside, &of));
	while (good && now() < end && !__atomic_load_n(&of.lost, __ATOMIC_RELAXED))
		good = post(IBV_WR_RDMA_READ, 0, sge(bss[0] + 500, 1000, near_mr),
			    (struct remote){ bss[1] + 5000, far_mr, 0, 0 }) &&
		       post(IBV_WR_RDMA_WRITE, IBV_SEND_FENCE | IBV_SEND_SIGNALED,
			    sge(bss[0], 4000, near_mr), (struct remote){ bss[1], far_mr, 0, 0 }) &&
		       done(&ends[0], &wc, IBV_WC_SUCCESS);
	__atomic_store_n(&of.ends, 1, __ATOMIC_RELAXED);
	pthread_join(thread, NULL);
	MUST(good);
	if (of.lost)
		return fail("write %llu of a peer is lost", (unsigned long long)of.lost);
	TRY(!ibv_dereg_mr(near_mr) && !ibv_dereg_mr(far_mr));
	return true;
}
