// SPDX-License-Identifier: Apache-2.0 OR MIT
/*
 * A part of process-calls.c: connections of a program whose device was lost and is back, and of a
 * child whose parent has some.
 */
#include <arpa/inet.h>

/* A NIC's, and a port that nobody else uses. */
static struct sockaddr_in address_of(int nic, uint16_t port)
{
	struct sockaddr_in address = { .sin_family = AF_INET, .sin_port = htons(port) };
	const char *all = getenv("VHOST_RDMA_ADDRESSES");
	char each[2][64] = {};

	MUST(all && sscanf(all, "%63s %63s", each[0], each[1]) > nic);
	MUST(inet_aton(each[nic], &address.sin_addr));
	return address;
}

static struct sockaddr_in address_at(uint16_t port)
{
	return address_of(0, port);
}

struct listening {
	struct rdma_event_channel *channel;
	struct rdma_cm_id *id;
};

static void end_listening(struct listening *it)
{
	int error = errno;

	if (it->id)
		MUST(!rdma_destroy_id(it->id));
	if (it->channel)
		rdma_destroy_event_channel(it->channel);
	memset(it, 0, sizeof(*it));
	errno = error;
}

/* With a channel of its own; false: that, or the address, cannot be had. */
static bool listens(struct listening *it, struct sockaddr_in at)
{
	memset(it, 0, sizeof(*it));
	it->channel = rdma_create_event_channel();
	if (it->channel && !rdma_create_id(it->channel, &it->id, NULL, RDMA_PS_TCP) &&
	    !rdma_bind_addr(it->id, (struct sockaddr *)&at) && !rdma_listen(it->id, 1))
		return true;
	end_listening(it);
	return false;
}

static void expects(struct rdma_event_channel *channel, enum rdma_cm_event_type type)
{
	struct rdma_cm_event *event;

	if (!readable(channel->fd, WAIT_MS))
		fail("no %s", rdma_event_str(type));
	MUST(!rdma_get_cm_event(channel, &event));
	if (event->event != type)
		fail("%s, not %s", rdma_event_str(event->event), rdma_event_str(type));
	MUST(!rdma_ack_cm_event(event));
}

static const struct rdma_conn_param no_qp = { .qp_num = 17 };

/* Asks for a connection with a listener of this process; what that gets. */
static struct rdma_cm_id *request(struct listening *asker, struct listening *listener,
				  struct sockaddr_in at)
{
	struct rdma_conn_param param = no_qp;
	struct rdma_cm_event *event;
	struct rdma_cm_id *asked;

	MUST((asker->channel = rdma_create_event_channel()));
	MUST(!rdma_create_id(asker->channel, &asker->id, NULL, RDMA_PS_TCP));
	MUST(!rdma_resolve_addr(asker->id, NULL, (struct sockaddr *)&at, 2000));
	expects(asker->channel, RDMA_CM_EVENT_ADDR_RESOLVED);
	MUST(!rdma_resolve_route(asker->id, 2000));
	expects(asker->channel, RDMA_CM_EVENT_ROUTE_RESOLVED);
	MUST(asker->id->verbs && !rdma_connect(asker->id, &param));
	MUST(readable(listener->channel->fd, WAIT_MS));
	MUST(!rdma_get_cm_event(listener->channel, &event));
	MUST(event->event == RDMA_CM_EVENT_CONNECT_REQUEST);
	asked = event->id;
	MUST(!rdma_ack_cm_event(event));
	return asked;
}

/* What is asked for is refused, and both hear of it. */
static void asks(struct listening *listener, struct sockaddr_in at)
{
	struct listening asker;
	struct rdma_cm_id *asked = request(&asker, listener, at);

	MUST(!rdma_reject(asked, NULL, 0));
	MUST(!rdma_destroy_id(asked));
	expects(asker.channel, RDMA_CM_EVENT_REJECTED);
	end_listening(&asker);
}

/* Each of these hears once that its device is gone, then nothing comes any more. */
static void hears_the_end(struct rdma_event_channel *channel, struct rdma_cm_id **ids, int count)
{
	struct rdma_cm_event *event;

	for (int left = count; left; left--) {
		int i = 0;

		if (!readable(channel->fd, WAIT_MS))
			fail("%d identifiers do not hear of the end", left);
		if (rdma_get_cm_event(channel, &event))
			fail("%d identifiers do not hear of the end (errno %d)", left, errno);
		if (event->event != RDMA_CM_EVENT_DEVICE_REMOVAL || event->status != -ENODEV)
			fail("%s, %d", rdma_event_str(event->event), event->status);
		while (i < count && ids[i] != event->id)
			i++;
		MUST(i < count);
		ids[i] = NULL;
		MUST(!rdma_ack_cm_event(event));
	}
	MUST(rdma_get_cm_event(channel, &event) == -1 && errno == ENODEV);
}

/*
 * Whoever runs this ends the device's process once it listens. A channel that was made before is of
 * a device that is gone, and may be ended at any time.
 */
static void returns(void)
{
	struct sockaddr_in any = { .sin_family = AF_INET, .sin_port = htons(4001) };
	struct listening everywhere, here, asker, again;
	struct rdma_conn_param param = no_qp;
	struct ibv_context **found;
	struct rdma_cm_id *asked;
	int tries, count = 0;

	MUST(listens(&everywhere, any) && listens(&here, address_at(4002)));
	asked = request(&asker, &here, address_at(4002));
	MUST(!rdma_accept(asked, &param));
	expects(asker.channel, RDMA_CM_EVENT_CONNECT_RESPONSE);
	printf("listening\n");
	fflush(stdout);
	hears_the_end(here.channel, (struct rdma_cm_id *[]){ here.id, asked }, 2);
	hears_the_end(asker.channel, (struct rdma_cm_id *[]){ asker.id }, 1);
	/* With its last identifier, the device is a channel's alone. */
	MUST(!rdma_destroy_id(asked));
	end_listening(&asker);
	end_listening(&here);
	for (tries = 0; !listens(&again, address_at(4002)); tries++) {
		if (tries == WAIT_MS / 10)
			fail("no connections though the device is back (errno %d)", errno);
		usleep(10000);
	}
	asks(&again, address_at(4002));
	found = rdma_get_devices(&count);
	MUST(found && count > 0);
	for (int i = 0; i < count; i++) {
		struct ibv_port_attr port;

		if (ibv_query_port(found[i], 1, &port))
			fail("a device that is listed is lost");
	}
	rdma_free_devices(found);
	/* Who listens everywhere is of no device. */
	hears_the_end(everywhere.channel, NULL, 0);
	end_listening(&everywhere);
	asks(&again, address_at(4002));
	end_listening(&again);
}

/* A NIC that was not there when the program began. */
static void appears(void)
{
	char *devices = getenv("VHOST_RDMA_DEVICES"), *second, both[512], later[64];
	struct listening first, other;
	int tries;

	MUST(devices && (devices = strdup(devices)) && (second = strchr(devices, ':')));
	*second++ = 0;
	second[strcspn(second, ":")] = 0;
	snprintf(later, sizeof(later), "/tmp/process-calls-later-%d", getpid());
	snprintf(both, sizeof(both), "%s:%s", devices, later);
	MUST(!setenv("VHOST_RDMA_DEVICES", both, 1));
	MUST(listens(&first, address_of(0, 4200)));
	MUST(!listens(&other, address_of(1, 4200)) && errno == EADDRNOTAVAIL);
	MUST(!symlink(second, later));
	for (tries = 0; !listens(&other, address_of(1, 4200)); tries++) {
		if (tries == WAIT_MS / 20)
			break;
		usleep(10000);
	}
	MUST(!unlink(later));
	if (!other.channel)
		fail("a NIC that came later is not found");
	asks(&other, address_of(1, 4200));
	asks(&first, address_of(0, 4200));
	end_listening(&other);
	end_listening(&first);
	free(devices);
}

static void in_child(uint16_t port, int generations)
{
	struct listening own;
	pid_t pid = fork();
	int status;

	MUST(pid >= 0);
	if (!pid) {
		if (generations > 1)
			in_child(port + 1, generations - 1);
		if (!listens(&own, address_at(port)))
			fail("generation %d has no connections (errno %d)", generations, errno);
		asks(&own, address_at(port));
		end_listening(&own);
		_exit(0);
	}
	MUST(waitpid(pid, &status, 0) == pid && !status);
}

/* A child of fork() has no connections of its parent's, and makes its own; so does its child. */
static void children(void)
{
	struct listening own;

	MUST(listens(&own, address_at(4100)));
	in_child(4101, 1);
	in_child(4102, 3);
	asks(&own, address_at(4100));
	end_listening(&own);
}
