// SPDX-License-Identifier: Apache-2.0 OR MIT
/*
 * process-channels: event channels that end under a thread that waits in them.
 *
 * With the kernel such a thread sleeps in write() or read() and never returns: what it sleeps in
 * lives as long as it does. Programs rely on that (rping ends so), and with NICs for processes it
 * has to be the same. Each round connects one NIC to another and takes all apart while events of
 * rdma_cm still come; it destroys a completion channel as well. A thread that gets an error fails
 * the program; at the end all threads are cancelled, and no descriptor may be left. Before that:
 * an identifier that goes with an event that nobody has taken leaves its channel with nothing.
 *
 *     process-channels ADDRESS ADDRESS ROUNDS
 *
 * Build: gcc -O2 -Wall -Wextra -o process-channels process-channels.c -lrdmacm -libverbs -lpthread
 */
#define _GNU_SOURCE
#include <arpa/inet.h>
#include <errno.h>
#include <poll.h>
#include <pthread.h>
#include <rdma/rdma_cma.h>
#include <sched.h>
#include <semaphore.h>
#include <stdatomic.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

#include "process-descriptors.h"

enum { WAIT_S = 20, PORT = 7000 };

/* A completion channel, and the thread that waits in it. */
struct sleeper {
	struct ibv_comp_channel *channel;
	pthread_t thread;
	atomic_int tid;
	atomic_bool inside;
	int error;
};

/* One end of a connection: its channel, and the thread that waits in it. */
struct end {
	struct rdma_event_channel *channel;
	struct rdma_cm_id *id, *child;
	pthread_t thread;
	sem_t established;
	sem_t gone;
	atomic_int tid;
	atomic_bool inside;
	int error;
};

static atomic_int errors;

static void die(const char *what)
{
	fprintf(stderr, "process-channels: %s: %s\n", what, strerror(errno));
	exit(1);
}

/* A thread that is in a call sleeps there: only then does the call outlive what it was given. */
static void wait_asleep(const atomic_bool *inside, const atomic_int *tid)
{
	char path[64], state = 0;

	while (!*inside)
		sched_yield();
	snprintf(path, sizeof(path), "/proc/self/task/%d/stat", (int)*tid);
	for (int tries = 0; state != 'S'; tries++) {
		FILE *stat = fopen(path, "r");

		if (!stat || fscanf(stat, "%*d (%*[^)]) %c", &state) != 1)
			die("a thread is gone");
		fclose(stat);
		if (tries == WAIT_S * 5000)
			die("a thread does not sleep");
		if (state != 'S')
			usleep(100);
	}
}

static void wait_for(sem_t *sem, const char *what)
{
	struct timespec until;

	clock_gettime(CLOCK_REALTIME, &until);
	until.tv_sec += WAIT_S;
	while (sem_timedwait(sem, &until))
		if (errno != EINTR)
			die(what);
}

static void make_qp(struct rdma_cm_id *id)
{
	struct ibv_qp_init_attr attr = {
		.qp_type = IBV_QPT_RC,
		.cap = { .max_send_wr = 1, .max_recv_wr = 1, .max_send_sge = 1, .max_recv_sge = 1 },
	};

	if (rdma_create_qp(id, NULL, &attr))
		die("rdma_create_qp");
}

static void step(struct end *end, struct rdma_cm_event *event)
{
	struct rdma_conn_param param = { .retry_count = 7 };

	switch (event->event) {
	case RDMA_CM_EVENT_ADDR_RESOLVED:
		if (rdma_resolve_route(event->id, 2000))
			die("rdma_resolve_route");
		break;
	case RDMA_CM_EVENT_ROUTE_RESOLVED:
		make_qp(event->id);
		if (rdma_connect(event->id, &param))
			die("rdma_connect");
		break;
	case RDMA_CM_EVENT_CONNECT_REQUEST:
		end->child = event->id;
		make_qp(event->id);
		if (rdma_accept(event->id, &param))
			die("rdma_accept");
		break;
	case RDMA_CM_EVENT_ESTABLISHED:
		sem_post(&end->established);
		break;
	case RDMA_CM_EVENT_DISCONNECTED:
		sem_post(&end->gone);
		break;
	default:
		errno = event->status;
		die(rdma_event_str(event->event));
	}
}

static void *watch(void *of)
{
	struct end *end = of;
	struct rdma_event_channel *channel = end->channel;
	struct rdma_cm_event *event;

	end->tid = gettid();
	for (;;) {
		end->inside = true;
		if (rdma_get_cm_event(channel, &event))
			break;
		end->inside = false;
		step(end, event);
		rdma_ack_cm_event(event);
	}
	end->error = errno;
	errors++;
	return NULL;
}

static void begin(struct end *end)
{
	end->inside = false;
	sem_init(&end->established, 0, 0);
	sem_init(&end->gone, 0, 0);
	end->channel = rdma_create_event_channel();
	if (!end->channel)
		die("rdma_create_event_channel");
	if (rdma_create_id(end->channel, &end->id, NULL, RDMA_PS_TCP))
		die("rdma_create_id");
	if (pthread_create(&end->thread, NULL, watch, end))
		die("pthread_create");
}

static void destroy(struct rdma_cm_id *id)
{
	if (id->qp)
		rdma_destroy_qp(id);
	if (rdma_destroy_id(id))
		die("rdma_destroy_id");
}

static void end_channel(struct end *end)
{
	destroy(end->id);
	wait_asleep(&end->inside, &end->tid);
	rdma_destroy_event_channel(end->channel);
}

static void *sleep_in(void *of)
{
	struct sleeper *sleeper = of;
	struct ibv_cq *cq;
	void *context;

	sleeper->tid = gettid();
	sleeper->inside = true;
	(void)ibv_get_cq_event(sleeper->channel, &cq, &context);
	sleeper->error = errno;
	errors++;
	return NULL;
}

static void end_completions(struct sleeper *sleeper, struct ibv_context *context)
{
	sleeper->inside = false;
	sleeper->channel = ibv_create_comp_channel(context);
	if (!sleeper->channel)
		die("ibv_create_comp_channel");
	if (pthread_create(&sleeper->thread, NULL, sleep_in, sleeper))
		die("pthread_create");
	wait_asleep(&sleeper->inside, &sleeper->tid);
	if (ibv_destroy_comp_channel(sleeper->channel))
		die("ibv_destroy_comp_channel");
}

static void round_trip(struct end *ends, struct sleeper *sleeper, struct sockaddr_in *at)
{
	struct end *server = &ends[0], *client = &ends[1];

	begin(server);
	begin(client);
	if (rdma_bind_addr(server->id, (struct sockaddr *)&at[0]) || rdma_listen(server->id, 1))
		die("listening");
	if (rdma_resolve_addr(client->id, (struct sockaddr *)&at[1], (struct sockaddr *)&at[0],
			      2000))
		die("rdma_resolve_addr");
	wait_for(&client->established, "the client is not connected");
	wait_for(&server->established, "the server is not connected");
	end_completions(sleeper, client->id->verbs);
	if (rdma_disconnect(client->id))
		die("rdma_disconnect");
	/* The client's own event of this comes meanwhile, or never. */
	end_channel(client);
	wait_for(&server->gone, "the server heard of no end");
	destroy(server->child);
	end_channel(server);
}

/* Whether there is something in a channel, within so long. */
static bool waits(const struct rdma_event_channel *channel, int ms)
{
	struct pollfd end = { .fd = channel->fd, .events = POLLIN };

	return poll(&end, 1, ms) == 1 && end.revents == POLLIN;
}

static void withdraw(struct sockaddr_in *at)
{
	struct rdma_event_channel *channel = rdma_create_event_channel();
	struct rdma_cm_id *ids[3];

	for (int i = 0; i < 3; i++) {
		if (!channel || rdma_create_id(channel, &ids[i], NULL, RDMA_PS_TCP))
			die("rdma_create_id");
		if (rdma_resolve_addr(ids[i], (struct sockaddr *)&at[1],
				      (struct sockaddr *)&at[0], 2000))
			die("rdma_resolve_addr");
	}
	for (int i = 0; i < 3; i++) {
		if (!waits(channel, WAIT_S * 1000)) {
			fprintf(stderr, "process-channels: no event of %d\n", 3 - i);
			exit(1);
		}
		destroy(ids[i]);
	}
	if (waits(channel, 100)) {
		fprintf(stderr, "process-channels: an event of nobody\n");
		exit(1);
	}
	rdma_destroy_event_channel(channel);
}

static void report(const char *call, int error)
{
	if (error)
		fprintf(stderr, "process-channels: %s: %s\n", call, strerror(error));
}

static void cancel(struct end *ends, struct sleeper *sleeper)
{
	pthread_t threads[] = { ends[0].thread, ends[1].thread, sleeper->thread };

	for (int i = 0; i < 3; i++) {
		pthread_cancel(threads[i]);
		pthread_join(threads[i], NULL);
	}
}

int main(int argc, char **argv)
{
	struct sockaddr_in at[2] = { { .sin_family = AF_INET, .sin_port = htons(PORT) },
				     { .sin_family = AF_INET } };
	int rounds = argc == 4 ? atoi(argv[3]) : 0, before, after;
	struct sleeper *sleepers;
	struct end *ends;

	if (rounds <= 0 || !inet_aton(argv[1], &at[0].sin_addr) ||
	    !inet_aton(argv[2], &at[1].sin_addr)) {
		fprintf(stderr, "usage: process-channels ADDRESS ADDRESS ROUNDS\n");
		return 2;
	}
	ends = calloc(rounds + 1, 2 * sizeof(*ends));
	sleepers = calloc(rounds + 1, sizeof(*sleepers));
	if (!ends || !sleepers)
		die("calloc");
	withdraw(at);
	/* The first opens the devices, which stay open. */
	round_trip(ends, sleepers, at);
	cancel(ends, sleepers);
	before = descriptors();
	for (int i = 1; i <= rounds; i++)
		round_trip(&ends[2 * i], &sleepers[i], at);
	usleep(200000);
	for (int i = 1; i <= rounds; i++) {
		report("rdma_get_cm_event", ends[2 * i].error);
		report("rdma_get_cm_event", ends[2 * i + 1].error);
		report("ibv_get_cq_event", sleepers[i].error);
		cancel(&ends[2 * i], &sleepers[i]);
	}
	/* The next that comes finds that nobody sleeps in those any more, and is left itself. */
	round_trip(ends, sleepers, at);
	cancel(ends, sleepers);
	after = descriptors();
	fprintf(stderr, "%d rounds, %d threads came back, %d descriptors left\n", rounds,
		(int)errors, after - before);
	return errors || after != before;
}
