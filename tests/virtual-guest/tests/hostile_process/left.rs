//! Cases of `hostile` that are not carried out by a process's door, each for a reason, and a test
//! that none is forgotten.

use std::collections::BTreeSet;
use std::path::Path;

/// What the reasons are.
const QUEUES: &str = "a process has no virtqueues";
const FRONT: &str = "a process has no vhost-user messages; its own are in tests/process/hostile.rs";
const KERNEL: &str = "a kernel's command or request is refused to a process [PDEV-CMD-1]";
const LISTS: &str = "a process's page list has one level [PDEV-MEM-3]";
const CUT: &str = "by this door: the attack `cuts`, and tests/process/loose.rs";
const HUGE: &str = "by this door: process::loose::huge_pages_are_memory_if_the_host_has_them";
const PIECES: &str = "by this door: process::hostile::pieces_of_memory_that_cannot_be [PDEV-MEM-5]";
const KILLED: &str =
    "by this door: process::ends::a_process_that_is_killed_in_the_middle_leaves_nothing";
const GIVEN: &str = "a process is given its kick descriptor, once";
const CHANNELS: &str = "by this door: the attack `channels`";
const SESSIONS: &str = "by this door: the attacks `sessions` and `context_churn`";

/// A case, and why it is not here. `attacks`: one of the library's.
const LEFT: &[(&str, &str)] = &[
    ("attacks::doorbell_pages", "a process has one context; its pages: floods"),
    ("attacks::resets", SESSIONS),
    ("attacks::fast_registrations", KERNEL),
    ("attacks::arms", CHANNELS),
    ("attacks::waiters", QUEUES),
    ("attacks::crowded_kicks", GIVEN),
    ("attacks::tables", FRONT),
    ("attacks::pauses", QUEUES),
    ("attacks::own_holes", "no attack on the device: its monitors' row is enough"),
    ("attacks::connections", SESSIONS),
    ("attacks::drivers", SESSIONS),
    ("chains::malformed_chains_are_given_back_empty_and_the_queue_goes_on", QUEUES),
    ("chains::rings_with_wild_indices_stop_until_they_are_set_up_again", QUEUES),
    ("chains::event_buffers_that_take_nothing_hold_nobody_up", CHANNELS),
    ("chains::virtqueues_at_the_end_of_memory_and_outside_are_refused_or_left_alone", QUEUES),
    ("descriptors::a_daemon_without_descriptors_refuses_and_says_so", FRONT),
    (
        "descriptors::a_descriptor_that_is_no_eventfd_is_closed_whatever_it_comes_with",
        "a process is given its eventfds; by this door: \
         process::hostile::descriptors_of_every_wrong_kind_are_refused",
    ),
    ("descriptors::a_session_holds_no_more_descriptors_than_its_queues_have_places", QUEUES),
    ("descriptors::a_socket_of_the_victims_path_keeps_the_victim_from_nothing", FRONT),
    ("descriptors::features_that_were_not_offered_end_the_connection", FRONT),
    ("descriptors::the_last_region_is_unplugged_and_the_connection_goes_on", FRONT),
    ("kernel::a_table_without_the_pages_that_all_rests_on_is_fatal_for_that_guest", FRONT),
    ("kernel::fast_registrations_without_end", KERNEL),
    ("kernel::keys_for_all_of_a_memory_in_pieces_share_it", KERNEL),
    ("kernel::memory_that_is_cut_off_is_fatal_for_that_guest", CUT),
    ("kernel::tables_of_the_same_page_again_and_again_come_to_an_end", LISTS),
    ("mapping::every_slot_can_be_plugged_and_no_more", PIECES),
    ("mapping::huge_pages_that_do_not_come_are_refused_where_they_are_named", HUGE),
    ("mapping::huge_pages_that_the_host_does_not_have_are_that_guests_affair", HUGE),
    ("mapping::memory_of_terabytes_takes_no_neighbours_addresses", PIECES),
    ("mapping::memory_that_is_refused_is_not_mapped", PIECES),
    ("mapping::memory_that_is_replaced_and_cut_off_under_a_command", CUT),
    ("mapping::parts_of_huge_pages_are_refused", HUGE),
    ("vmm::a_vmm_that_is_killed_in_traffic_leaves_nothing", KILLED),
    ("vmm::be_a_vmm", KILLED),
    ("vmm::half_a_message_holds_up_its_own_nic_only", "a process's message is a packet"),
    ("vmm::kick_descriptors_that_are_emptied_hold_nobody_up", "by this door: the attack `kicks`"),
    ("vmm::kick_descriptors_that_are_slow_to_watch_have_a_watch_of_their_own", GIVEN),
    ("vmm::messages_that_make_no_sense_end_their_connection_at_most", FRONT),
    ("vmm::notification_descriptors_that_block_hold_nobody_up", CHANNELS),
    ("vmm::questions_whose_answers_nobody_reads", "by this door: the attack `messages`"),
    ("vmm::queues_that_are_set_up_without_end_leave_nothing", FRONT),
];

/// The cases of a module of `hostile`.
fn cases(module: &str) -> Vec<String> {
    let dir = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/hostile");
    let text = std::fs::read_to_string(dir.join(format!("{module}.rs"))).expect(module);
    let mut found = Vec::new();
    let mut is_test = false;
    for line in text.lines() {
        is_test |= line == "#[test]";
        if let Some(rest) = line.strip_prefix("fn ").filter(|_| is_test) {
            let name = rest.split('(').next().expect("a name");
            found.push(format!("{module}::{name}"));
            is_test = false;
        }
    }
    found
}

/// The modules that a list of a test's modules has.
fn modules(main: &str) -> BTreeSet<&str> {
    let names = main.lines().filter_map(|line| line.strip_prefix("mod ")?.strip_suffix(';'));
    names.filter(|name| !["attacks", "left"].contains(name)).collect()
}

#[test]
fn each_case_of_the_hostile_guest_is_here_or_left_for_a_reason() {
    let here = modules(include_str!("main.rs"));
    let all = modules(include_str!("../hostile/main.rs"));
    assert!(here.is_subset(&all), "{here:?}");
    let left = LEFT.iter().filter(|(name, _)| !name.starts_with("attacks::"));
    let left: BTreeSet<String> = left.map(|(name, _)| (*name).to_owned()).collect();
    let missing = all.difference(&here).flat_map(|module| cases(module)).collect();
    assert_eq!(left, missing);
    assert!(here.iter().map(|module| cases(module).len()).sum::<usize>() > 25, "they run");
}

#[test]
fn each_attack_of_a_guest_is_here_or_left_for_a_reason() {
    let left: BTreeSet<_> =
        LEFT.iter().filter_map(|(name, _)| name.strip_prefix("attacks::")).collect();
    let all = virtual_guest::attack::all();
    let others = all.iter().filter(|attack| !attack.comes_by(crate::DOOR));
    assert_eq!(left, others.map(|attack| attack.name).collect());
}
