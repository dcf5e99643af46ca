// SPDX-License-Identifier: (GPL-2.0 OR Linux-OpenIB)
/*
 * Device memory: a NIC for processes has none, and says so (max_dm_size is 0). The guest's provider
 * names these operations in its table.
 */
#include "kernel.h"
#include "virtio_rdma.h"

struct ibv_dm *vrdma_alloc_dm(struct ibv_context *context, struct ibv_alloc_dm_attr *attr)
{
	errno = EOPNOTSUPP;
	return NULL;
}

int vrdma_free_dm(struct ibv_dm *dm)
{
	return EOPNOTSUPP;
}

struct ibv_mr *vrdma_reg_dm_mr(struct ibv_pd *pd, struct ibv_dm *dm, uint64_t offset, size_t length,
			       unsigned int access)
{
	errno = EOPNOTSUPP;
	return NULL;
}

struct ibv_dm *vrdma_import_dm(struct ibv_context *context, uint32_t handle)
{
	errno = EOPNOTSUPP;
	return NULL;
}

void vrdma_unimport_dm(struct ibv_dm *dm)
{
}
