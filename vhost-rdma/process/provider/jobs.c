// SPDX-License-Identifier: (GPL-2.0 OR Linux-OpenIB)
/*
 * Accesses of peers to private memory: jobs that the device gives to a thread of this library
 * (docs/virtio-rdma-process.md, 4), one after the other. What a peer writes is in the in half
 * already, what it reads is wanted in the out half, and atomics are done on the program's own
 * words, so that they are atomic for its processors too.
 *
 * The program may have unmapped what it has registered. The kernel copies for this thread, and says
 * EFAULT where a load of its own would end the program (process_vm_readv(2): a process may always
 * name itself). Words are looked at in the same manner before they are touched: a program that
 * unmaps one in the very moment between may still end.
 */
#define _GNU_SOURCE
#include "virtio_rdma.h"

#include <linux/futex.h>
#include <signal.h>
#include <sys/socket.h>
#include <sys/syscall.h>
#include <sys/uio.h>
#include <unistd.h>

#include "private.h"

#define STACK ((size_t)256 << 10)
/* Of one packet: jobs that may come (4.8), answers that are sent. */
#define JOBS 8
#define ANSWERS 4

enum kind {
	ARRIVED = 1,
	WANTED,
	COMPARE_SWAP,
	FETCH_ADD,
};

struct job {
	__le64 id;
	__le32 op;
	__le32 key;
	__le64 address;
	__le32 length;
	__le32 reserved;
	__le64 operands[2];
};
static_assert(sizeof(struct job) == 48, "a job");

struct done {
	__le64 id;
	__le32 status;
	__le32 reserved;
	__le64 value;
};
static_assert(sizeof(struct done) == 24, "an answer");

/* Where a job is done. */
struct spot {
	uint8_t *memory;
	uint8_t *in;
	uint8_t *out;
	size_t len;
};

/*
 * Moves bytes as a device does (docs/virtio-rdma.md, 8.3): each is stored once, none before those
 * below it, and each load and store is aligned to its size, so that what the program reads or
 * writes by one aligned access of 8 bytes or less is never of two messages in part. memcpy(3) does
 * none of that. A byte has the same place in its page on either side (private.c, region_make()).
 */
static void move(uint8_t *to, const uint8_t *from, size_t len)
{
	size_t size;

	for (; len; to += size, from += size, len -= size) {
		const void *source = from;
		void *target = to;

		size = sizeof(uint64_t);
		while (size > len || (uintptr_t)to % size)
			size /= 2;
		if (size == 8)
			__atomic_store_n((uint64_t *)target,
					 __atomic_load_n((const uint64_t *)source,
							 __ATOMIC_RELAXED), __ATOMIC_RELEASE);
		else if (size == 4)
			__atomic_store_n((uint32_t *)target,
					 __atomic_load_n((const uint32_t *)source,
							 __ATOMIC_RELAXED), __ATOMIC_RELEASE);
		else if (size == 2)
			__atomic_store_n((uint16_t *)target,
					 __atomic_load_n((const uint16_t *)source,
							 __ATOMIC_RELAXED), __ATOMIC_RELEASE);
		else
			__atomic_store_n(to, __atomic_load_n(from, __ATOMIC_RELAXED),
					 __ATOMIC_RELEASE);
	}
}

/* Whether a word can be written: the kernel adds 0 to it, and EFAULT is its answer where not. */
static int is_writable(void *word)
{
	uint32_t nobody = 0;
	int op = FUTEX_OP(FUTEX_OP_ADD, 0, FUTEX_OP_CMP_EQ, 0x7ff);

	return !(syscall(SYS_futex, &nobody, FUTEX_WAKE_OP_PRIVATE, 0, NULL, word, op) < 0 &&
		 errno == EFAULT);
}

static int is_word(const struct spot *spot)
{
	return spot->len == sizeof(uint64_t) && !((uintptr_t)spot->memory & 7);
}

/* Bytes before the last aligned word. */
static size_t before_the_last_word(const struct spot *spot)
{
	size_t last = ((uintptr_t)spot->memory + spot->len - 1) % sizeof(uint64_t) + 1;

	return spot->len > last ? spot->len - last : 0;
}

/* Whether a call failed because a filter of system calls does not let us. */
static int is_filtered(ssize_t done)
{
	return done < 0 && (errno == ENOSYS || errno == EPERM);
}

/* 0 if all of it was copied. */
static int write_memory(const struct vrdma_mirror *mirror, const struct spot *spot, size_t len)
{
	struct iovec ours = { .iov_base = spot->in, .iov_len = len };
	struct iovec programs = { .iov_base = spot->memory, .iov_len = len };
	ssize_t done = process_vm_writev(mirror->pid, &ours, 1, &programs, 1, 0);

	if (!is_filtered(done))
		return done != (ssize_t)len;
	move(spot->memory, spot->in, len);
	return 0;
}

static int read_memory(const struct vrdma_mirror *mirror, const struct spot *spot)
{
	struct iovec ours = { .iov_base = spot->out, .iov_len = spot->len };
	struct iovec programs = { .iov_base = spot->memory, .iov_len = spot->len };
	ssize_t done = process_vm_readv(mirror->pid, &ours, 1, &programs, 1, 0);

	if (!is_filtered(done))
		return done != (ssize_t)spot->len;
	move(spot->out, spot->memory, spot->len);
	return 0;
}

/*
 * The last word comes after all others, as from an adapter: programs wait for the last byte of a
 * message. The kernel's copy keeps no order within itself (Intel SDM, volume 3, 8.2.4), and stores
 * fewer than 8 bytes one by one (Linux, arch/x86/lib/copy_user_64.S): so the word is stored here.
 * An atomic write comes like any other, and has to be one store (IBTA A19).
 */
static int arrive(const struct vrdma_mirror *mirror, const struct spot *spot)
{
	size_t first = before_the_last_word(spot);
	uint8_t *last = spot->memory + first;

	if (first && write_memory(mirror, spot, first))
		return 1;
	/* The kernel looks at aligned words of 4 bytes. */
	if (!is_writable((void *)((uintptr_t)last & ~(uintptr_t)3)))
		return 1;
	move(last, spot->in + first, spot->len - first);
	return 0;
}

/* What lies in one word is read as it is stored; the kernel has said that it is there. */
static int leave(const struct vrdma_mirror *mirror, const struct spot *spot)
{
	if (read_memory(mirror, spot))
		return 1;
	if (!before_the_last_word(spot))
		move(spot->out, spot->memory, spot->len);
	return 0;
}

static int change(const struct job *job, const struct spot *spot, uint64_t *before)
{
	uint64_t *word = (uint64_t *)(void *)spot->memory;
	uint64_t first = le64toh(job->operands[0]);

	if (!is_word(spot) || !is_writable(word))
		return 1;
	if (le32toh(job->op) == FETCH_ADD) {
		*before = __atomic_fetch_add(word, first, __ATOMIC_SEQ_CST);
		return 0;
	}
	*before = first;
	__atomic_compare_exchange_n(word, before, le64toh(job->operands[1]), 0, __ATOMIC_SEQ_CST,
				    __ATOMIC_SEQ_CST);
	return 0;
}

static int work(const struct vrdma_mirror *mirror, const struct job *job, const struct spot *spot,
		uint64_t *value)
{
	switch (le32toh(job->op)) {
	case ARRIVED:
		return arrive(mirror, spot);
	case WANTED:
		return leave(mirror, spot);
	case COMPARE_SWAP:
	case FETCH_ADD:
		return change(job, spot, value);
	default:
		return 1;
	}
}

static struct done serve(struct vrdma_mirror *mirror, const struct job *job)
{
	struct vrdma_region *region = vrdma_region_get(mirror, le32toh(job->key));
	struct spot spot = { .len = le32toh(job->length) };
	uint64_t value = 0;
	int fault = 1;
	size_t at;

	if (region && vrdma_inside(region, le64toh(job->address), spot.len, &at)) {
		spot.memory = region->memory + at;
		spot.in = region->in + at;
		spot.out = spot.in + region->half;
		fault = work(mirror, job, &spot, &value);
	}
	if (region)
		vrdma_region_put(region);
	return (struct done){
		.id = job->id,
		.status = htole32(fault ? VIRTIO_RDMA_ERR_FAULT : VIRTIO_RDMA_OK),
		.value = htole64(value),
	};
}

static void say(const struct vrdma_mirror *mirror, const struct done *done, size_t count)
{
	ssize_t n;

	do
		n = send(mirror->jobs.fd, done, count * sizeof(*done), MSG_NOSIGNAL);
	while (n < 0 && errno == EINTR);
}

/*
 * To the end of the channel, which is that of the device or of the context. What has come together
 * is answered in a few parts, so that others go on meanwhile and are not woken for each.
 */
static void *serve_all(void *arg)
{
	struct vrdma_mirror *mirror = arg;
	struct done done[ANSWERS];
	struct job jobs[JOBS];
	size_t i, count, ready;
	ssize_t n;

	for (;;) {
		n = recv(mirror->jobs.fd, jobs, sizeof(jobs), 0);
		if (n < 0 && errno == EINTR)
			continue;
		if (n <= 0 || (size_t)n % sizeof(jobs[0]))
			return NULL;
		/* It may have been closed meanwhile. */
		if (!vrdma_file_is_ours(&mirror->jobs))
			return NULL;
		count = (size_t)n / sizeof(jobs[0]);
		for (i = 0, ready = 0; i < count; i++) {
			done[ready++] = serve(mirror, &jobs[i]);
			if (ready == ANSWERS || i + 1 == count) {
				say(mirror, done, ready);
				ready = 0;
			}
		}
	}
}

static int start(struct vrdma_mirror *mirror)
{
	sigset_t all, before;
	pthread_attr_t attr;
	int ret;

	ret = pthread_attr_init(&attr);
	if (ret)
		return ret;
	/* A program with much thread-local storage needs more, and gets what is usual. */
	(void)pthread_attr_setstacksize(&attr, STACK);
	sigfillset(&all);
	pthread_sigmask(SIG_SETMASK, &all, &before);
	ret = pthread_create(&mirror->worker, &attr, serve_all, mirror);
	if (ret)
		ret = pthread_create(&mirror->worker, NULL, serve_all, mirror);
	pthread_sigmask(SIG_SETMASK, &before, NULL);
	pthread_attr_destroy(&attr);
	return ret;
}

int vrdma_jobs_begin(struct vrdma_session *session, struct vrdma_mirror *mirror)
{
	struct vrdma_request request = { VRDMA_MIRROR_ADD, NULL, 0, -1 };
	int fd = -1, ret;
	struct vrdma_answer answer = { NULL, 0, &fd, 1 };

	ret = vrdma_ask(session, &request, &answer);
	if (ret)
		return ret;
	mirror->jobs = vrdma_file_of(fd);
	mirror->pid = getpid();
	ret = start(mirror);
	if (ret)
		close(fd);
	return ret;
}

void vrdma_jobs_end(struct vrdma_mirror *mirror)
{
	/* Else it has ended, or does so with the session. */
	if (vrdma_file_is_ours(&mirror->jobs))
		shutdown(mirror->jobs.fd, SHUT_RDWR);
	pthread_join(mirror->worker, NULL);
	vrdma_file_close(&mirror->jobs);
}
