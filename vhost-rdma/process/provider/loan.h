/* SPDX-License-Identifier: (GPL-2.0 OR Linux-OpenIB) */
/*
 * Memory of the program that is a file's already: shared mappings of memfds, of POSIX and System V
 * shared memory, of huge pages. The device maps the file itself, and such memory is copied once.
 *
 * What a registration gets is a *loan*: a part of one file, or of a few whose mappings lie side by
 * side. It is what the file has there, as pinned pages would be: whatever the program maps at these
 * addresses later, the region stays the file's until it is deregistered.
 */
#ifndef VRDMA_LOAN_H
#define VRDMA_LOAN_H

#include <stddef.h>
#include <stdint.h>

#include "maps.h"
#include "session.h"

/* Mappings that a registration may lie in: more are rare, and a session has few pieces. */
#define VRDMA_LOAN_PARTS 4

/* Memory that lies in files: mappings side by side, each of another file or another part of one. */
struct vrdma_filed {
	struct vrdma_map maps[VRDMA_LOAN_PARTS];
	size_t num;		/* 0: it is not all of shared files */
};

struct vrdma_loan;

/* Lends a range that `filed` tells of; where the device finds it; an errno. */
int vrdma_lend(struct vrdma_session *session, const struct vrdma_filed *filed, uintptr_t at,
	       size_t len, struct vrdma_loan **loan, const void **there);
/* The region of a key has it from now on. */
int vrdma_loan_keep(struct vrdma_session *session, struct vrdma_loan *loan, uint32_t key);
/* The device does not find it: the program has cut the file off. It serves no other region. */
void vrdma_loan_gone(struct vrdma_session *session, struct vrdma_loan *loan);
void vrdma_loan_drop(struct vrdma_session *session, struct vrdma_loan *loan);
int vrdma_is_lent(struct vrdma_session *session, uint32_t key);
/* A key's region is gone. */
void vrdma_lent_forget(struct vrdma_session *session, uint32_t key);
void vrdma_loans_end(struct vrdma_session *session);

#endif
