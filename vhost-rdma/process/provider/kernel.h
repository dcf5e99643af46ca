/* SPDX-License-Identifier: (GPL-2.0 OR Linux-OpenIB) */
/*
 * In the place of a kernel driver, for the guest's provider.
 *
 * The provider of guests (vhost-rdma/guest/provider) speaks to uverbs: it makes and destroys
 * objects by the ibv_cmd_* functions, has its rings in anonymous memory and maps pages of the
 * command fd. This header comes before its sources and turns those calls to a session (kernel.c),
 * so that one provider serves both: what posts, polls and arms is compiled from the same lines.
 */
#ifndef VRDMA_KERNEL_H
#define VRDMA_KERNEL_H

#include <config.h>

#include <sys/mman.h>

#include <infiniband/cmd_ioctl.h>
#include <infiniband/driver.h>
#include <infiniband/kern-abi.h>
#include <infiniband/verbs.h>

#define IN_ITS_PLACE(result, name, ...) result vrdma_local_##name(__VA_ARGS__)

IN_ITS_PLACE(int, get_context, struct verbs_context *, struct ibv_get_context *, size_t,
	     struct ib_uverbs_get_context_resp *, size_t);
IN_ITS_PLACE(int, query_context, struct ibv_context *, struct ibv_command_buffer *);
IN_ITS_PLACE(int, query_device_any, struct ibv_context *, const struct ibv_query_device_ex_input *,
	     struct ibv_device_attr_ex *, size_t, struct ib_uverbs_ex_query_device_resp *,
	     size_t *);
IN_ITS_PLACE(int, query_port, struct ibv_context *, uint8_t, struct ibv_port_attr *,
	     struct ibv_query_port *, size_t);
IN_ITS_PLACE(int, alloc_pd, struct ibv_context *, struct ibv_pd *, struct ibv_alloc_pd *, size_t,
	     struct ib_uverbs_alloc_pd_resp *, size_t);
IN_ITS_PLACE(int, dealloc_pd, struct ibv_pd *);
IN_ITS_PLACE(int, reg_mr, struct ibv_pd *, void *, size_t, uint64_t, int, struct verbs_mr *,
	     struct ibv_reg_mr *, size_t, struct ib_uverbs_reg_mr_resp *, size_t);
IN_ITS_PLACE(int, reg_dmabuf_mr, struct ibv_pd *, uint64_t, size_t, uint64_t, int, int,
	     struct verbs_mr *, void *);
IN_ITS_PLACE(int, rereg_mr, struct verbs_mr *, uint32_t, void *, size_t, uint64_t, int,
	     struct ibv_pd *, struct ibv_rereg_mr *, size_t, struct ib_uverbs_rereg_mr_resp *,
	     size_t);
IN_ITS_PLACE(int, dereg_mr, struct verbs_mr *);
IN_ITS_PLACE(int, query_mr, struct ibv_pd *, struct verbs_mr *, uint32_t);
IN_ITS_PLACE(int, alloc_dm, struct ibv_context *, const struct ibv_alloc_dm_attr *,
	     struct verbs_dm *, struct ibv_command_buffer *);
IN_ITS_PLACE(int, free_dm, struct verbs_dm *);
IN_ITS_PLACE(int, reg_dm_mr, struct ibv_pd *, struct verbs_dm *, uint64_t, size_t, unsigned int,
	     struct verbs_mr *, struct ibv_command_buffer *);
IN_ITS_PLACE(int, execute_ioctl, struct ibv_context *, struct ibv_command_buffer *);
IN_ITS_PLACE(int, alloc_mw, struct ibv_pd *, enum ibv_mw_type, struct ibv_mw *,
	     struct ibv_alloc_mw *, size_t, struct ib_uverbs_alloc_mw_resp *, size_t);
IN_ITS_PLACE(int, dealloc_mw, struct ibv_mw *);
IN_ITS_PLACE(int, create_cq, struct ibv_context *, int, struct ibv_comp_channel *, int,
	     struct ibv_cq *, struct ibv_create_cq *, size_t, struct ib_uverbs_create_cq_resp *,
	     size_t);
IN_ITS_PLACE(int, resize_cq, struct ibv_cq *, int, struct ibv_resize_cq *, size_t,
	     struct ib_uverbs_resize_cq_resp *, size_t);
IN_ITS_PLACE(int, modify_cq, struct ibv_cq *, struct ibv_modify_cq_attr *, struct ibv_modify_cq *,
	     size_t);
IN_ITS_PLACE(int, destroy_cq, struct ibv_cq *);
IN_ITS_PLACE(int, create_srq, struct ibv_pd *, struct ibv_srq *, struct ibv_srq_init_attr *,
	     struct ibv_create_srq *, size_t, struct ib_uverbs_create_srq_resp *, size_t);
IN_ITS_PLACE(int, modify_srq, struct ibv_srq *, struct ibv_srq_attr *, int, struct ibv_modify_srq *,
	     size_t);
IN_ITS_PLACE(int, query_srq, struct ibv_srq *, struct ibv_srq_attr *, struct ibv_query_srq *,
	     size_t);
IN_ITS_PLACE(int, destroy_srq, struct ibv_srq *);
IN_ITS_PLACE(int, create_qp_ex, struct ibv_context *, struct verbs_qp *,
	     struct ibv_qp_init_attr_ex *, struct ibv_create_qp *, size_t,
	     struct ib_uverbs_create_qp_resp *, size_t);
IN_ITS_PLACE(int, modify_qp, struct ibv_qp *, struct ibv_qp_attr *, int, struct ibv_modify_qp *,
	     size_t);
IN_ITS_PLACE(int, query_qp, struct ibv_qp *, struct ibv_qp_attr *, int, struct ibv_qp_init_attr *,
	     struct ibv_query_qp *, size_t);
IN_ITS_PLACE(int, destroy_qp, struct ibv_qp *);
IN_ITS_PLACE(int, create_ah, struct ibv_pd *, struct ibv_ah *, struct ibv_ah_attr *,
	     struct ib_uverbs_create_ah_resp *, size_t);
IN_ITS_PLACE(int, destroy_ah, struct ibv_ah *);
IN_ITS_PLACE(int, attach_mcast, struct ibv_qp *, const union ibv_gid *, uint16_t);
IN_ITS_PLACE(int, detach_mcast, struct ibv_qp *, const union ibv_gid *, uint16_t);
void *vrdma_local_mmap(void *addr, size_t len, int prot, int flags, int fd, off_t offset);
int vrdma_local_munmap(void *addr, size_t len);
void vrdma_local_uninit_context(struct verbs_context *vctx);

#ifndef VRDMA_KERNEL_ITSELF
#define ibv_cmd_get_context vrdma_local_get_context
#define ibv_cmd_query_context vrdma_local_query_context
#define ibv_cmd_query_device_any vrdma_local_query_device_any
#define ibv_cmd_query_port vrdma_local_query_port
#define ibv_cmd_alloc_pd vrdma_local_alloc_pd
#define ibv_cmd_dealloc_pd vrdma_local_dealloc_pd
#define ibv_cmd_reg_mr vrdma_local_reg_mr
#define ibv_cmd_reg_dmabuf_mr vrdma_local_reg_dmabuf_mr
#define ibv_cmd_rereg_mr vrdma_local_rereg_mr
#define ibv_cmd_dereg_mr vrdma_local_dereg_mr
#define ibv_cmd_query_mr vrdma_local_query_mr
#define ibv_cmd_alloc_dm vrdma_local_alloc_dm
#define ibv_cmd_free_dm vrdma_local_free_dm
#define ibv_cmd_reg_dm_mr vrdma_local_reg_dm_mr
#define execute_ioctl vrdma_local_execute_ioctl
#define ibv_cmd_alloc_mw vrdma_local_alloc_mw
#define ibv_cmd_dealloc_mw vrdma_local_dealloc_mw
#define ibv_cmd_create_cq vrdma_local_create_cq
#define ibv_cmd_resize_cq vrdma_local_resize_cq
#define ibv_cmd_modify_cq vrdma_local_modify_cq
#define ibv_cmd_destroy_cq vrdma_local_destroy_cq
#define ibv_cmd_create_srq vrdma_local_create_srq
#define ibv_cmd_modify_srq vrdma_local_modify_srq
#define ibv_cmd_query_srq vrdma_local_query_srq
#define ibv_cmd_destroy_srq vrdma_local_destroy_srq
#define ibv_cmd_create_qp_ex vrdma_local_create_qp_ex
#define ibv_cmd_modify_qp vrdma_local_modify_qp
#define ibv_cmd_query_qp vrdma_local_query_qp
#define ibv_cmd_destroy_qp vrdma_local_destroy_qp
#define ibv_cmd_create_ah vrdma_local_create_ah
#define ibv_cmd_destroy_ah vrdma_local_destroy_ah
#define ibv_cmd_attach_mcast vrdma_local_attach_mcast
#define ibv_cmd_detach_mcast vrdma_local_detach_mcast
#define verbs_uninit_context vrdma_local_uninit_context
#define mmap vrdma_local_mmap
#define munmap vrdma_local_munmap
#endif

#endif
