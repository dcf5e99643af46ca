// SPDX-License-Identifier: (GPL-2.0 OR Linux-OpenIB)
/*
 * What the program does with its descriptors and threads is its own affair.
 *
 * It may close descriptors that it does not know (closefrom(3)), and have others by the numbers:
 * with the kernel a command to one of those fails (ENOTTY), and nothing happens to it. Here a
 * message would be sent to the program's peer, a file of its would be written to, or a child of
 * fork() would close it. So before a number is used for more than a look, it is compared with what
 * it was. Files and sockets have an inode each; those that share one (eventfd(2)) belong to a
 * session, whose socket speaks for them.
 *
 * And it may cancel threads. Calls of verbs are no points of cancellation with the kernel, as
 * ioctl(2) and stores are none, but close(2), poll(2), write(2) and others are (pthreads(7)): who
 * were cancelled in one would leave what he has locked.
 */
#define _GNU_SOURCE
#include "apart.h"

#include <errno.h>
#include <sys/stat.h>
#include <unistd.h>

struct vrdma_file vrdma_file_of(int fd)
{
	struct vrdma_file file = { .fd = fd };
	struct stat is;

	if (!fstat(fd, &is)) {
		file.dev = is.st_dev;
		file.ino = is.st_ino;
	}
	return file;
}

bool vrdma_file_is_ours(const struct vrdma_file *file)
{
	struct stat is;

	if (file->fd < 0)
		return false;
	/* Where a filter of system calls forbids it, there is no reason to believe the worst. */
	if (fstat(file->fd, &is))
		return errno != EBADF;
	return !file->ino || (is.st_dev == file->dev && is.st_ino == file->ino);
}

void vrdma_file_close(const struct vrdma_file *file)
{
	if (vrdma_file_is_ours(file))
		close(file->fd);
}

void vrdma_hold(pthread_mutex_t *mutex, int *before)
{
	int state;

	pthread_setcancelstate(PTHREAD_CANCEL_DISABLE, &state);
	pthread_mutex_lock(mutex);
	*before = state;
}

void vrdma_let_go(pthread_mutex_t *mutex, const int *before)
{
	int state = *before;

	pthread_mutex_unlock(mutex);
	pthread_setcancelstate(state, NULL);
}
