//! Many devices.

use crate::world::{CONFIG, World};

#[tokio::test]
async fn a_thousand_ids_and_twenty_pods_at_once() {
    let mut world = World::new().await;
    world.kill_agent().await;
    world.start_agent(&CONFIG.replace("count=4", "count=1000")).await;
    let pods = (0..20).map(|pod| {
        let agent = std::sync::Arc::clone(world.agent());
        tokio::spawn(async move {
            let ids: Vec<String> = (0..3).map(|n| format!("blue-{}", pod * 3 + n)).collect();
            agent.allocate("blue", &[ids]).await.unwrap().remove(0).envs
        })
    });
    let mut macs = std::collections::BTreeSet::new();
    for pod in pods.collect::<Vec<_>>() {
        let env = pod.await.unwrap();
        macs.extend((0..3).map(|n| env[&format!("VHOST_RDMA_BLUE_{n}_MAC")].clone()));
    }
    assert_eq!(macs.len(), 60, "every NIC has a MAC address of its own");
    assert_eq!(world.nics().len(), 60);
    world.settle().await;
    assert!(world.nics().is_empty(), "no pod came, so nothing remains");
}
