//! A simulated kernel that dies or refuses at a chosen effect, and the proof that nothing is lost
//! then.

use std::cell::RefCell;
use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};
use std::rc::Rc;

use proptest::prelude::{Just, Strategy, any, prop, prop_oneof, proptest};

use super::inventory::{Function, Inventory, Netdev, PhysicalFunction, VirtualFunction};
use super::journal::Claim;
use super::{Host, Manager, Outcome, PciAddress, User, VFIO_PCI};
use crate::link::{VfChange, VfSettings};
use crate::{Error, Result};

const OWN: &str = "igbvf";
const TOTAL: u32 = 4;

#[derive(Debug, Clone, PartialEq, Eq)]
struct Vf {
    driver: Option<String>,
    driver_override: Option<String>,
    settings: VfSettings,
}

/// What survives the death of a process.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
struct Kernel {
    vfs: Vec<Vf>,
}

/// What becomes of an effect.
#[derive(Debug, Clone, Copy)]
enum Fate {
    /// The process dies just before.
    DieBefore,
    /// The process dies just after.
    DieAfter,
    /// The kernel refuses.
    Refuse,
}

#[derive(Debug, Clone, Default)]
struct Fake {
    kernel: Rc<RefCell<Kernel>>,
    /// The effect of this number meets this fate.
    fate: Option<(u32, Fate)>,
    count: u32,
    users: Vec<User>,
}

struct Death;

impl Fake {
    fn on(kernel: &Rc<RefCell<Kernel>>, fate: Option<(u32, Fate)>) -> Self {
        Self { kernel: Rc::clone(kernel), fate, ..Self::default() }
    }

    fn effect(&mut self, effect: impl FnOnce(&mut Kernel) -> Result<()>) -> Result<()> {
        self.count += 1;
        let fate = self.fate.filter(|(at, _)| *at == self.count).map(|(_, fate)| fate);
        match fate {
            Some(Fate::DieBefore) => resume_unwind(Box::new(Death)),
            Some(Fate::Refuse) => return Err(refused()),
            _ => {}
        }
        effect(&mut self.kernel.borrow_mut())?;
        if matches!(fate, Some(Fate::DieAfter)) {
            resume_unwind(Box::new(Death));
        }
        Ok(())
    }

    fn vf(
        &mut self,
        function: PciAddress,
        effect: impl FnOnce(&mut Vf) -> Result<()>,
    ) -> Result<()> {
        self.effect(|kernel| {
            let at = (0..TOTAL).find(|index| address(*index) == function).ok_or_else(refused)?;
            effect(kernel.vfs.get_mut(at as usize).ok_or_else(refused)?)
        })
    }
}

fn refused() -> Error {
    Error::NotFound("the kernel refuses".to_owned())
}

fn pf() -> PciAddress {
    "0000:01:00.0".parse().unwrap()
}

fn address(index: u32) -> PciAddress {
    format!("0000:01:10.{index}").parse().unwrap()
}

fn function(address: PciAddress) -> Function {
    Function {
        address,
        vendor: 0,
        device: 0,
        driver: None,
        driver_override: None,
        numa_node: None,
        iommu_group: None,
        netdevs: Vec::new(),
        rdma_devices: Vec::new(),
    }
}

impl Host for Fake {
    fn inventory(&mut self) -> Result<Inventory> {
        let kernel = self.kernel.borrow();
        let vfs: Vec<VirtualFunction> = kernel
            .vfs
            .iter()
            .zip(0..)
            .map(|(vf, index)| VirtualFunction {
                function: Function {
                    driver: vf.driver.clone(),
                    driver_override: vf.driver_override.clone(),
                    ..function(address(index))
                },
                pf: pf(),
                index,
                settings: Some(vf.settings.clone()),
                vfio_group: None,
            })
            .collect();
        let netdev = Netdev {
            name: "ens1".to_owned(),
            index: None,
            kind: None,
            address: None,
            mtu: None,
            state: None,
            carrier: true,
            speed: None,
        };
        let function = Function { netdevs: vec![netdev], ..function(pf()) };
        let vf_count = u32::try_from(vfs.len()).unwrap();
        Ok(Inventory {
            functions: vec![PhysicalFunction { function, total_vfs: TOTAL, vf_count, vfs }],
        })
    }

    fn users(&mut self, _: &VirtualFunction) -> Result<Vec<User>> {
        Ok(self.users.clone())
    }

    fn boot(&mut self) -> Result<String> {
        Ok("boot".to_owned())
    }

    fn set_vf_count(&mut self, _: PciAddress, count: u32) -> Result<()> {
        self.effect(|kernel| {
            // As `sriov_numvfs_store` does.
            if count != 0 && !kernel.vfs.is_empty() {
                return Err(refused());
            }
            kernel.vfs = (0..count)
                .map(|index| Vf {
                    driver: Some(OWN.to_owned()),
                    driver_override: None,
                    settings: fresh(index),
                })
                .collect();
            Ok(())
        })
    }

    fn set_vf(&mut self, _: PciAddress, vf: u32, change: &VfChange) -> Result<()> {
        // One effect for each field, as the real one.
        if let Some(rate) = change.max_tx_rate {
            self.vf(address(vf), |vf| {
                vf.settings.max_tx_rate = Some(rate);
                Ok(())
            })?;
        }
        if let Some(trust) = change.trust {
            self.vf(address(vf), |vf| {
                vf.settings.trust = Some(trust);
                Ok(())
            })?;
        }
        Ok(())
    }

    fn set_driver_override(&mut self, function: PciAddress, driver: Option<&str>) -> Result<()> {
        self.vf(function, |vf| {
            vf.driver_override = driver.map(str::to_owned);
            Ok(())
        })
    }

    fn unbind(&mut self, function: PciAddress, driver: &str) -> Result<()> {
        self.vf(function, |vf| {
            if vf.driver.as_deref() != Some(driver) {
                return Err(refused());
            }
            vf.driver = None;
            Ok(())
        })
    }

    fn probe(&mut self, function: PciAddress) -> Result<()> {
        self.vf(function, |vf| {
            if vf.driver.is_none() {
                vf.driver = Some(vf.driver_override.clone().unwrap_or_else(|| OWN.to_owned()));
            }
            Ok(())
        })
    }

    fn obstacle(&mut self, _: PciAddress, _: &str) -> Option<String> {
        None
    }
}

fn fresh(index: u32) -> VfSettings {
    VfSettings { index, max_tx_rate: Some(0), trust: Some(false), ..VfSettings::default() }
}

#[derive(Debug, Clone)]
enum Act {
    Create(u32),
    Set(u32, Option<u32>, Option<bool>),
    Bind(u32),
    Unbind(u32),
}

fn act() -> impl Strategy<Value = Act> {
    prop_oneof![
        (0..=TOTAL).prop_map(Act::Create),
        (0..TOTAL, prop::option::of(0..1000_u32), any::<Option<bool>>())
            .prop_map(|(vf, rate, trust)| Act::Set(vf, rate, trust)),
        (0..TOTAL).prop_map(Act::Bind),
        (0..TOTAL).prop_map(Act::Unbind),
    ]
}

fn perform(manager: &mut Manager<Fake>, act: &Act) -> Result<()> {
    match act {
        Act::Create(count) => manager.create("ens1", *count, true),
        Act::Set(vf, max_tx_rate, trust) => manager.set(
            &address(*vf),
            &VfChange { max_tx_rate: *max_tx_rate, trust: *trust, ..VfChange::default() },
        ),
        Act::Bind(vf) => manager.bind(&address(*vf), true),
        Act::Unbind(vf) => manager.unbind(&address(*vf), true),
    }
}

/// What the act makes of a kernel if nothing goes wrong.
fn after(kernel: &Kernel, history: &[Act], act: &Act) -> Kernel {
    let dir = tempfile::tempdir().unwrap();
    let shadow = Rc::new(RefCell::new(Kernel::default()));
    let mut manager = Manager::new(Fake::on(&shadow, None), dir.path());
    for act in history {
        let _ = perform(&mut manager, act);
    }
    assert_eq!(*shadow.borrow(), *kernel);
    let _ = perform(&mut manager, act);
    shadow.take()
}

fn fate() -> impl Strategy<Value = Fate> {
    prop_oneof![Just(Fate::DieBefore), Just(Fate::DieAfter), Just(Fate::Refuse)]
}

proptest! {
    /// Whatever was done, and wherever the next operation dies or fails, and even if its recovery
    /// dies: the end is the state after or before.
    #[test]
    fn a_crash_leaks_nothing(
        history in prop::collection::vec(act(), 0..6),
        last in act(),
        at in 1..6_u32,
        fate in fate(),
        again in 1..6_u32
    ) {
        let dir = tempfile::tempdir().unwrap();
        let kernel = Rc::new(RefCell::new(Kernel::default()));
        let mut manager = Manager::new(Fake::on(&kernel, None), dir.path());
        for act in &history {
            let _ = perform(&mut manager, act);
        }
        drop(manager);
        let old = kernel.borrow().clone();
        let new = after(&old, &history, &last);

        let mut manager = Manager::new(Fake::on(&kernel, Some((at, fate))), dir.path());
        let result = catch_unwind(AssertUnwindSafe(|| perform(&mut manager, &last)));
        drop(manager);
        if let Ok(Err(_)) = &result {
            let now = kernel.borrow();
            let remade = matches!(last, Act::Create(_)) && now.vfs.len() == old.vfs.len();
            assert!(*now == old || remade, "a failure changes nothing");
        }
        // The first recovery dies too, perhaps.
        let mut manager =
            Manager::new(Fake::on(&kernel, Some((again, Fate::DieBefore))), dir.path());
        let _ = catch_unwind(AssertUnwindSafe(|| manager.recover()));
        drop(manager);
        let mut manager = Manager::new(Fake::on(&kernel, None), dir.path());
        manager.recover().unwrap();
        assert_eq!(manager.pending().unwrap(), []);
        let now = kernel.borrow().clone();
        // A number of functions cannot be restored with their settings: only removal is undone by
        // new ones.
        let remade = matches!(last, Act::Create(_)) && now.vfs.len() == old.vfs.len();
        assert!(now == new || now == old || remade, "{now:?} is neither {old:?} nor {new:?}");
        // Nobody is without a driver, and each can go back to its own.
        for index in 0..now.vfs.len() {
            let vf = address(u32::try_from(index).unwrap());
            manager.unbind(&vf, true).unwrap();
            assert_eq!(kernel.borrow().vfs[index].driver.as_deref(), Some(OWN));
            assert_eq!(kernel.borrow().vfs[index].driver_override, None);
        }
    }
}

fn one(
    kernel: &Rc<RefCell<Kernel>>,
    dir: &std::path::Path,
    fate: Option<(u32, Fate)>,
) -> Manager<Fake> {
    Manager::new(Fake::on(kernel, fate), dir)
}

#[test]
fn an_interrupted_binding_is_completed_or_undone() {
    let dir = tempfile::tempdir().unwrap();
    let kernel = Rc::new(RefCell::new(Kernel::default()));
    one(&kernel, dir.path(), None).create("ens1", 2, false).unwrap();
    // Died between the old driver and the new one.
    let mut dying = one(&kernel, dir.path(), Some((3, Fate::DieBefore)));
    assert!(catch_unwind(AssertUnwindSafe(|| dying.bind(&address(1), false))).is_err());
    assert_eq!(kernel.borrow().vfs[1].driver, None);
    // The kernel refuses the rest: back it goes.
    let mut refusing = one(&kernel, dir.path(), Some((1, Fate::Refuse)));
    assert_eq!(refusing.recover().unwrap()[0].outcome, Outcome::RolledBack);
    assert_eq!(kernel.borrow().vfs[1].driver.as_deref(), Some(OWN));
    assert_eq!(kernel.borrow().vfs[1].driver_override, None);
    // Died at the same place; the next operation on that physical function ends it first.
    let mut dying = one(&kernel, dir.path(), Some((3, Fate::DieBefore)));
    assert!(catch_unwind(AssertUnwindSafe(|| dying.bind(&address(1), false))).is_err());
    one(&kernel, dir.path(), None)
        .set(&address(0), &VfChange { max_tx_rate: Some(7), ..VfChange::default() })
        .unwrap();
    assert_eq!(kernel.borrow().vfs[1].driver.as_deref(), Some(VFIO_PCI));
}

#[test]
fn what_is_used_or_reserved_is_refused() {
    let dir = tempfile::tempdir().unwrap();
    let kernel = Rc::new(RefCell::new(Kernel::default()));
    let mut manager = one(&kernel, dir.path(), None);
    manager.create("ens1", 2, false).unwrap();
    assert!(
        manager.create("ens1", TOTAL + 1, false).unwrap_err().to_string().contains("can have 4")
    );
    let mut host = Fake::on(&kernel, None);
    host.users =
        vec![User::Process { pid: 7, name: "qemu".to_owned(), file: "/dev/vfio/3".to_owned() }];
    let mut busy = Manager::new(host, dir.path());
    for error in [
        busy.create("ens1", 0, false),
        busy.create("ens1", 3, false),
        busy.bind(&address(0), false),
    ] {
        let message = error.unwrap_err().to_string();
        assert!(message.contains("in use: process 7 (qemu)"), "{message}");
    }
    busy.bind(&address(0), true).unwrap();

    let claim = |owner: &str| Claim { owner: owner.to_owned(), note: String::new() };
    manager.claim(&address(1), claim("agent")).unwrap();
    manager.claim(&address(1), claim("agent")).unwrap();
    assert!(manager.claim(&address(1), claim("other")).is_err());
    for error in [manager.bind(&address(1), true), manager.create("ens1", 0, true)] {
        assert!(error.unwrap_err().to_string().contains("reserved by agent"));
    }
    let mut agent = one(&kernel, dir.path(), None).acting_for("agent");
    agent.bind(&address(1), false).unwrap();
    assert!(!manager.release(&address(1), "other").unwrap());
    assert!(manager.release(&address(1), "agent").unwrap());
    assert!(!manager.release(&address(1), "agent").unwrap());
    manager.create("ens1", 0, false).unwrap();
    assert_eq!(*kernel.borrow(), Kernel::default());
}
