//! What the kubelet is told of IDs that cannot be used, or not yet.

use std::time::Duration;

use vhost_rdma_agent::host::{Function, Inventory};

use crate::world::{BLUE, CONFIG, World, config};

const RNIC: &str = "injection='classic'\n[[pools]]\nname='blue'\nkind='vhost-user'\ncount=2\n\
    network='blue'\nbacking='rnic:mlx5_0'\n";

fn told(world: &World) -> Vec<(String, bool)> {
    let list = world.agent().subscribe("blue").unwrap().borrow().clone();
    list.iter().map(|device| (device.id.clone(), device.health == "Healthy")).collect()
}

fn healthy(world: &World) -> usize {
    told(world).into_iter().filter(|(_, healthy)| *healthy).count()
}

fn inventory(fault: Option<&str>) -> Inventory {
    let rnic = Function {
        rdma: Some("mlx5_0".to_owned()),
        numa: Some(1),
        fault: fault.map(str::to_owned),
        ..Function::default()
    };
    Inventory { functions: vec![rnic], netns_mode: None }
}

#[tokio::test]
async fn nics_on_an_rnic_are_as_well_as_it_is() {
    let world = World::new().await;
    world.agent().reloaded(config(RNIC)).await;
    assert_eq!(healthy(&world), 0, "there is no such device");
    let refused = world.allocate(&["blue-0"]).await.unwrap_err();
    assert!(refused.contains("no RDMA device mlx5_0"), "{refused}");
    *world.hardware.0.lock().unwrap() = inventory(None);
    world.agent().rescan().await;
    assert_eq!(healthy(&world), 2);
    let list = world.agent().subscribe("blue").unwrap().borrow().clone();
    assert_eq!(list[0].topology.as_ref().unwrap().nodes[0].id, 1);
    *world.hardware.0.lock().unwrap() = inventory(Some("the port of mlx5_0 is down"));
    world.agent().rescan().await;
    assert_eq!(healthy(&world), 0);
}

#[tokio::test]
async fn a_daemon_that_refuses_a_pool_makes_it_attract_nobody_until_it_may_have_changed() {
    let world = World::new().await;
    *world.hardware.0.lock().unwrap() = inventory(None);
    world.agent().reloaded(config(RNIC)).await;
    world.daemon.table().refuses = Some("built without host-rnic".to_owned());
    let refused = world.allocate(&["blue-0"]).await.unwrap_err();
    assert!(refused.contains("built without host-rnic"), "{refused}");
    assert_eq!(healthy(&world), 0);
    world.settle().await;
    assert_eq!(healthy(&world), 0);
    world.daemon.table().refuses = None;
    world.daemon.restart();
    world.settle().await;
    assert_eq!(healthy(&world), 2);
    world.allocate(&["blue-0"]).await.unwrap();
}

#[tokio::test]
async fn while_a_node_starts_its_pods_nics_are_healthy_and_allocate_waits_for_the_daemon() {
    let mut world = World::new().await;
    world.allocate(&["blue-0"]).await.unwrap();
    world.kubelet.give("p", BLUE, "blue-0");
    world.settle().await;
    world.kill_agent().await;
    world.daemon.table().down = true;
    world.start = Duration::from_secs(600);
    world.patience = Duration::from_secs(30);
    world.start_agent(CONFIG).await;
    let first: Vec<bool> = told(&world).into_iter().map(|(_, healthy)| healthy).collect();
    assert_eq!(first, [true, false, false, false]);
    let daemon = world.daemon.clone();
    let comes = tokio::spawn(async move {
        tokio::time::sleep(Duration::from_millis(300)).await;
        daemon.table().down = false;
    });
    world.allocate(&["blue-1"]).await.unwrap();
    comes.await.unwrap();
    world.settle().await;
    assert_eq!(healthy(&world), 4);
    // One that was there and went is not starting.
    world.daemon.table().down = true;
    world.settle().await;
    assert_eq!(healthy(&world), 0);
}

#[tokio::test]
async fn a_daemon_that_does_not_come_is_not_waited_for_without_end() {
    let mut world = World::new().await;
    world.allocate(&["blue-0"]).await.unwrap();
    world.kill_agent().await;
    world.daemon.table().down = true;
    world.patience = Duration::from_millis(200);
    world.start_agent(CONFIG).await;
    assert_eq!(healthy(&world), 0, "it had no time to start");
    let began = std::time::Instant::now();
    let refused = world.allocate(&["blue-1"]).await.unwrap_err();
    assert!(refused.contains("does not answer"), "{refused}");
    assert!(began.elapsed() >= Duration::from_millis(200));
}

#[tokio::test]
async fn limits_that_were_changed_reach_the_nics_that_pods_have() {
    let world = World::new().await;
    world.allocate(&["blue-0"]).await.unwrap();
    world.kubelet.give("p", BLUE, "blue-0");
    world.settle().await;
    let limit = || world.daemon.table().nics["k8s.blue-0"].limits.unwrap().max_qps;
    assert_eq!(limit(), 7);
    world.agent().reloaded(config(&CONFIG.replace("max_qps=7", "max_qps=9"))).await;
    world.settle().await;
    assert_eq!(limit(), 9);
    let calls = world.daemon.table().calls;
    world.settle().await;
    assert_eq!(world.daemon.table().calls, calls, "and then there is nothing to do");
}

/// What the agent answers over HTTP.
async fn get(address: std::net::SocketAddr, path: &str) -> String {
    ask(tokio::net::TcpStream::connect(address).await.unwrap(), path).await
}

async fn ask(mut stream: tokio::net::TcpStream, path: &str) -> String {
    use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};

    let request = format!("GET {path} HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n");
    stream.write_all(request.as_bytes()).await.unwrap();
    let mut said = String::new();
    let read = tokio::time::timeout(Duration::from_secs(10), stream.read_to_string(&mut said));
    read.await.unwrap_or_else(|_| panic!("{path} waits")).unwrap();
    said
}

#[tokio::test]
async fn probes_do_not_wait_for_a_call_of_the_daemon() {
    let world = World::new().await;
    let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
    let address = listener.local_addr().unwrap();
    let server = tokio::spawn(vhost_rdma_agent::http::serve(listener, world.agent().clone()));
    let hangs = std::sync::Arc::new(tokio::sync::Notify::new());
    world.daemon.table().hangs = Some(hangs.clone());
    let agent = world.agent().clone();
    let allocation =
        tokio::spawn(async move { agent.allocate("blue", &[vec!["blue-0".to_owned()]]).await });
    while world.daemon.table().hangs.is_some() {
        tokio::time::sleep(Duration::from_millis(1)).await;
    }
    for path in ["/healthz", "/readyz", "/metrics"] {
        let said = get(address, path).await;
        assert!(said.starts_with("HTTP/1.1 200"), "{path}: {said}");
    }
    assert!(!allocation.is_finished());
    hangs.notify_one();
    allocation.await.unwrap().unwrap();
    assert!(get(address, "/metrics").await.contains("pool_granted{pool=\"blue\""));
    server.abort();
}

/// So many ask and do not read, and so many never finish asking.
const STRANGERS: usize = 100;

#[tokio::test]
async fn whoever_asks_and_does_not_read_holds_nobody_up() {
    use std::io::{ErrorKind, Read as _, Write as _};

    let world = World::new().await;
    let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
    let address = listener.local_addr().unwrap();
    let server = tokio::spawn(vhost_rdma_agent::http::serve(listener, world.agent().clone()));
    let there = std::sync::Arc::new(std::sync::Barrier::new(2));
    let are_there = there.clone();
    let strangers = std::thread::spawn(move || {
        let all = ["GET /metrics HTTP/1.1\r\nHost: x\r\n\r\n", "GET /met"].repeat(STRANGERS);
        let mut all: Vec<_> = all
            .into_iter()
            .map(|text| {
                let mut stream = std::net::TcpStream::connect(address).unwrap();
                let _ = stream.write_all(text.as_bytes());
                stream
            })
            .collect();
        are_there.wait();
        let mut open = |patience: Duration| {
            let is_open = |stream: &mut std::net::TcpStream| {
                stream.set_read_timeout(Some(patience)).unwrap();
                loop {
                    match stream.read(&mut [0; 4096]) {
                        Ok(0) => return false,
                        Ok(_) => {}
                        Err(error) => return error.kind() == ErrorKind::WouldBlock,
                    }
                }
            };
            all.iter_mut().filter_map(|stream| is_open(stream).then_some(())).count()
        };
        (open(Duration::from_millis(100)), open(Duration::from_secs(11)))
    });
    tokio::task::spawn_blocking(move || there.wait()).await.unwrap();
    let mut longest = Duration::ZERO;
    while !strangers.is_finished() {
        let began = std::time::Instant::now();
        world.agent().status().await;
        // The kubelet is none of them.
        let socket = tokio::net::TcpSocket::new_v4().unwrap();
        socket.bind("127.0.0.2:0".parse().unwrap()).unwrap();
        let said = ask(socket.connect(address).await.unwrap(), "/healthz").await;
        assert!(said.starts_with("HTTP/1.1 200"), "{said}");
        longest = longest.max(began.elapsed());
        tokio::time::sleep(Duration::from_millis(10)).await;
    }
    let (first, later) = strangers.join().unwrap();
    assert!(longest < Duration::from_secs(1), "{longest:?}");
    assert!(first <= 8 && later == 0, "{first} are open, and {later} after ten seconds");
    server.abort();
}
