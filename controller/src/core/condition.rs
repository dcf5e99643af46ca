//! Conditions of what the controller judges.

use vhost_rdma_cluster_api::{Condition, set_condition};

/// Sets the condition `Accepted`: `wrong` says what is wrong.
pub(super) fn accepted(all: &mut Vec<Condition>, wrong: &[String], generation: Option<i64>) {
    let new = if wrong.is_empty() {
        Condition::new("Accepted", true, "Valid", "")
    } else {
        Condition::new("Accepted", false, "Invalid", wrong.join("; "))
    };
    set_condition(all, new.of(generation));
}

/// Whether the condition `Accepted` holds.
pub(super) fn is_accepted(all: &[Condition]) -> bool {
    all.iter().any(|condition| condition.type_ == "Accepted" && condition.holds())
}

/// The first sixteen; a status must not grow with the cluster.
pub(super) fn some(all: impl IntoIterator<Item = String>) -> Vec<String> {
    all.into_iter().take(16).collect()
}
