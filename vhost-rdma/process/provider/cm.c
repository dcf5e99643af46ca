// SPDX-License-Identifier: (GPL-2.0 OR Linux-OpenIB)
/*
 * The connection manager of a device that is a socket (docs/virtio-rdma-process.md, 8): what
 * librdmacm asks of it, as messages to the daemon.
 */
#include "kernel.h"

#include <rdma/rdma_user_cm.h>
#include <unistd.h>

#include "cm.h"
#include "session.h"

int vrdma_cm_open(struct ibv_context *context, uint32_t *number, int *fd)
{
	struct vrdma_request request = { VRDMA_CM_ADD, NULL, 0, -1 };
	__le32 made[2] = {};
	struct vrdma_answer answer = { made, sizeof(made), fd, 1 };
	int ret = vrdma_ask(vrdma_session_of(context), &request, &answer);

	if (!ret)
		*number = le32toh(made[0]);
	/* The device has made one for which the program had no descriptor. */
	else if (ret == EMFILE && made[0])
		vrdma_cm_close(context, le32toh(made[0]));
	return ret;
}

void vrdma_cm_close(struct ibv_context *context, uint32_t number)
{
	__le32 which[2] = { htole32(number) };
	struct vrdma_request request = { VRDMA_CM_REMOVE, which, sizeof(which), -1 };
	struct vrdma_answer none = {};

	/* With the device its channels are gone. */
	(void)vrdma_ask(vrdma_session_of(context), &request, &none);
}

int vrdma_cm_command(struct ibv_context *context, uint32_t number, const void *cmd, size_t len,
		     void *resp, size_t resp_len)
{
	struct {
		__le32 number[2];
		union {
			struct rdma_ucm_cmd_hdr hdr;
			uint8_t bytes[400];
		} cmd;
	} body = { .number = { htole32(number) } };
	struct vrdma_request request = { VRDMA_CM_COMMAND, &body, sizeof(body.number) + len, -1 };
	struct vrdma_answer answer = { resp, resp_len, NULL, 0 };
	int ret;

	if (len > sizeof(body.cmd))
		return EINVAL;
	memcpy(body.cmd.bytes, cmd, len);
	ret = vrdma_ask(vrdma_session_of(context), &request, &answer);
	if (ret == EEXIST)
		return EADDRINUSE;
	if (ret == EHOSTUNREACH && body.cmd.hdr.cmd == RDMA_USER_CM_CMD_BIND_IP)
		return EADDRNOTAVAIL;
	return ret;
}
