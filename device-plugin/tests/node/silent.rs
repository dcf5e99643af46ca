//! A network of the daemon that does not answer: its tenant keeps it so, and others do not wait.

use std::time::{Duration, Instant};

use vhost_rdma_agent::daemon::Pace;

use crate::daemon::FakeDaemon;
use crate::kubelet::eventually;
use crate::world::{BLUE, CONFIG, World, config};

const RED: &str = "[[pools]]\nname='red'\nkind='vhost-user'\ncount=2\nnetwork='red'\n";
const CALL: Duration = Duration::from_millis(300);

/// Two pools, of two networks; one that is silent is left alone for the length of the test.
async fn two_networks(rest: Duration) -> World {
    let mut world = World::new().await;
    world.kill_agent().await;
    world.pace = Pace { call: CALL, rest, longest: rest * 4 };
    world.start_agent(&format!("{CONFIG}{RED}")).await;
    world
}

async fn red(world: &World, id: &str) -> Result<(), String> {
    let ids = [vec![id.to_owned()]];
    let asked = world.agent().allocate("red", &ids);
    let answered = tokio::time::timeout(Duration::from_secs(10), asked).await;
    answered.map_err(|_| "still waiting".to_owned())?.map_err(|error| error.to_string())?;
    Ok(())
}

#[tokio::test]
async fn a_silent_network_keeps_the_pods_of_no_other_waiting() {
    let world = two_networks(Duration::from_secs(3600)).await;
    world.daemon.table().silent = Some("blue".to_owned());
    let agent = world.agent().clone();
    let first =
        tokio::spawn(async move { agent.allocate("blue", &[vec!["blue-0".to_owned()]]).await });
    let asked = || (world.daemon.table().unanswered == 1).then_some(());
    eventually("the silent network is asked", asked).await;
    let began = Instant::now();
    red(&world, "red-0").await.unwrap();
    assert!(began.elapsed() < CALL * 4, "{:?}", began.elapsed());
    let refused = first.await.unwrap().unwrap_err().to_string();
    assert!(refused.contains("network \"blue\" of the daemon does not answer"), "{refused}");
    // From now on nobody waits for it at all, and the kubelet gives none of its IDs to a pod.
    let began = Instant::now();
    for id in ["blue-1", "blue-2"] {
        assert!(world.allocate(&[id]).await.is_err());
    }
    world.settle().await;
    assert!(began.elapsed() < CALL * 2, "{:?}", began.elapsed());
    assert_eq!(world.daemon.table().unanswered, 1);
    let list = world.agent().subscribe("blue").unwrap().borrow().clone();
    assert!(list.iter().all(|device| device.health == "Unhealthy"), "{list:?}");
    red(&world, "red-1").await.unwrap();
}

#[tokio::test]
async fn nics_of_a_silent_network_end_later_and_keep_nobody_waiting() {
    let world = two_networks(CALL).await;
    world.allocate(&["blue-0", "blue-1", "blue-2"]).await.unwrap();
    for (pod, id) in [("p", "blue-0"), ("q", "blue-1"), ("r", "blue-2")] {
        world.kubelet.give(pod, BLUE, id);
    }
    world.settle().await;
    world.daemon.table().silent = Some("blue".to_owned());
    for pod in ["p", "q", "r"] {
        world.kubelet.delete(pod);
    }
    let began = Instant::now();
    world.settle().await;
    red(&world, "red-0").await.unwrap();
    world.kubelet.give("s", "vhost-rdma.io/red", "red-0");
    // Three NICs that each wait in each of five rounds would be fifteen times that.
    assert!(began.elapsed() < CALL * 6, "{:?}", began.elapsed());
    assert_eq!(world.nics().len(), 4);
    world.daemon.table().silent = None;
    tokio::time::sleep(CALL * 5).await;
    world.settle().await;
    assert_eq!(world.nics(), ["k8s.red-0"]);
}

/// A network that the supervisor knows, and whose process is silent, rests longer each time.
#[tokio::test]
async fn what_the_supervisor_answers_by_itself_shortens_no_rest() {
    let world = two_networks(CALL).await;
    world.daemon.table().silent = Some("blue".to_owned());
    let unanswered = async || {
        // Another run of the daemon is asked for the network first.
        world.daemon.restart();
        world.settle().await;
        assert!(world.allocate(&["blue-0"]).await.is_err());
        world.daemon.table().unanswered
    };
    assert_eq!(unanswered().await, 1);
    tokio::time::sleep(CALL + CALL / 2).await;
    assert_eq!(unanswered().await, 2, "its rest is over");
    tokio::time::sleep(CALL + CALL / 4).await;
    assert_eq!(unanswered().await, 2, "it rests for twice as long");
}

fn qps(world: &World, id: &str) -> u32 {
    world.daemon.table().nics[&format!("k8s.{id}")].limits.unwrap().max_qps
}

/// NICs of the silent network come first, by the names of their IDs.
#[tokio::test]
async fn limits_reach_nics_of_other_networks_while_one_is_silent() {
    let mut world = two_networks(Duration::from_secs(3600)).await;
    world.kill_agent().await;
    let pace = Pace { call: Duration::from_secs(4), ..world.pace };
    world.pace = pace;
    world.start_agent(&format!("{CONFIG}{RED}")).await;
    world.allocate(&["blue-0", "blue-1"]).await.unwrap();
    red(&world, "red-0").await.unwrap();
    for (pod, resource, id) in
        [("p", BLUE, "blue-0"), ("q", BLUE, "blue-1"), ("r", "vhost-rdma.io/red", "red-0")]
    {
        world.kubelet.give(pod, resource, id);
    }
    world.settle().await;
    let text = format!("{}{RED}limits={{max_qps=9}}\n", CONFIG.replace("max_qps=7", "max_qps=8"));
    world.daemon.table().silent = Some("blue".to_owned());
    world.agent().configure(config(&text)).await;
    let agent = world.agent().clone();
    let began = Instant::now();
    let round = tokio::spawn(async move { agent.reconcile().await });
    eventually("the other network's limit", || (qps(&world, "red-0") == 9).then_some(())).await;
    assert!(began.elapsed() < pace.call / 2, "{:?}", began.elapsed());
    // Nor do pods wait.
    red(&world, "red-1").await.unwrap();
    assert!(began.elapsed() < pace.call / 2, "{:?}", began.elapsed());
    round.await.unwrap();
    assert_eq!((qps(&world, "blue-0"), qps(&world, "blue-1")), (7, 7));
    // It answers again, and is asked when it has rested.
    world.daemon.table().silent = None;
    world.kill_agent().await;
    world.start_agent(&text).await;
    world.settle().await;
    assert_eq!((qps(&world, "blue-0"), qps(&world, "blue-1")), (8, 8));
}

/// A daemon that says which networks do not answer: the kubelet admits no other pod while one is
/// asked.
#[tokio::test]
async fn a_network_that_is_known_to_be_silent_is_not_waited_for_even_once() {
    let mut world = two_networks(Duration::from_secs(3600)).await;
    world.kill_agent().await;
    world.pace.call = Duration::from_secs(5);
    world.start_agent(&format!("{CONFIG}{RED}")).await;
    world.allocate(&["blue-0"]).await.unwrap();
    world.kubelet.give("p", BLUE, "blue-0");
    world.settle().await;
    let silent = |daemon: &FakeDaemon, is: bool| {
        let mut table = daemon.table();
        table.silent = is.then(|| "blue".to_owned());
        table.says_silent = is;
    };
    // It has become silent since all was looked at last.
    silent(&world.daemon, true);
    let began = Instant::now();
    let refused = world.allocate(&["blue-1"]).await.unwrap_err();
    assert!(refused.contains("network \"blue\" of the daemon does not answer"), "{refused}");
    assert!(began.elapsed() < world.pace.call / 2, "{:?}", began.elapsed());
    // A daemon that it is the first to look at.
    world.kill_agent().await;
    world.start_agent(&format!("{CONFIG}{RED}")).await;
    let began = Instant::now();
    world.allocate(&["blue-1"]).await.unwrap_err();
    assert!(began.elapsed() < Duration::from_millis(900), "{:?}", began.elapsed());
    assert_eq!(world.daemon.table().unanswered, 0, "it is not asked at all");
    red(&world, "red-0").await.unwrap();
    // One that was slow for a moment is asked.
    silent(&world.daemon, false);
    world.kill_agent().await;
    world.start_agent(&format!("{CONFIG}{RED}")).await;
    silent(&world.daemon, true);
    let daemon = world.daemon.clone();
    let answers = tokio::spawn(async move {
        tokio::time::sleep(Duration::from_millis(200)).await;
        silent(&daemon, false);
    });
    world.allocate(&["blue-1"]).await.unwrap();
    answers.await.unwrap();
}
