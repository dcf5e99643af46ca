//! Every attack of the library (`src/attack`) beside bystanders in another network on the same
//! worker: nobody is harmed, nothing grows, no turn is charged more than it may be, and the
//! bystanders' requests take little longer than without it. What it costs an optimised daemon is
//! the isolation benchmark's to say.

use std::time::{Duration, Instant};

use virtual_guest::attack::{Attack, Size};

use crate::scene::Scene;

/// How long an attack goes on, and how often it is carried out at least.
const TIME: Duration = Duration::from_millis(700);
const STRIKES: u64 = 2;
/// A strike that has not ended after this never will.
const SOON: Duration = Duration::from_secs(120);

pub(crate) fn suffer(name: &str) {
    let attack = Attack::named(name).expect("an attack of that name");
    let scene = Scene::new(attack.budget << 20);
    let ground = attack.ground(&scene.world, crate::DOOR, Size::Short);
    scene.networks_are_there();
    let campaign = attack.set_up(&ground);
    scene.during_within(scene.bound_beside(attack), || {
        let begin = Instant::now();
        campaign.begin();
        while begin.elapsed() < TIME || campaign.strikes() < STRIKES {
            assert!(campaign.goes_on(), "the attack itself failed");
            assert!(begin.elapsed() < SOON, "a strike does not end");
            std::thread::sleep(Duration::from_millis(5));
        }
        campaign.pause();
    });
    scene.is_within_its_budget();
    drop(campaign);
    ground
        .places
        .iter()
        .for_each(|place| drop(scene.world.daemon.run(&["nic", "rm", &place.name])));
    scene.verdict();
}

/// A test for each of them, and one that none is forgotten.
macro_rules! attacks {
    ($($name:ident)*) => {
        $(#[test] fn $name() { $crate::suffer::suffer(stringify!($name)); })*

        #[test]
        fn each_attack_is_a_case() {
            let cases = [$(stringify!($name)),*];
            let all = virtual_guest::attack::all();
            let here = all.iter().filter(|attack| attack.comes_by($crate::DOOR));
            let missing: Vec<_> =
                here.map(|attack| attack.name).filter(|name| !cases.contains(name)).collect();
            assert!(missing.is_empty(), "no case for {missing:?}");
        }
    };
}

pub(crate) use attacks;
