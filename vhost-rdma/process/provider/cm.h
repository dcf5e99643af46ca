/* SPDX-License-Identifier: (GPL-2.0 OR Linux-OpenIB) */
/* The device's connection manager, for struct verbs_local_ops. */
#ifndef VRDMA_CM_H
#define VRDMA_CM_H

#include <stddef.h>
#include <stdint.h>

#include <infiniband/verbs.h>

int vrdma_cm_open(struct ibv_context *context, uint32_t *number, int *fd);
void vrdma_cm_close(struct ibv_context *context, uint32_t number);
int vrdma_cm_command(struct ibv_context *context, uint32_t number, const void *cmd, size_t len,
		     void *resp, size_t resp_len);

#endif
