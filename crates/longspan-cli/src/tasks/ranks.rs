//! The processes that `mpirun` started together. Rank 0 holds the run; the others do what it says.

use anyhow::Result;

/// The processes, as this one sees them; there are none in a build without MPI.
#[cfg(not(feature = "mpi"))]
pub enum Ranks {}

/// The processes, as this one sees them.
#[cfg(feature = "mpi")]
pub struct Ranks(mpi::environment::Universe);

/// How many processes `mpirun` started: Open MPI's word for it, and that of other kinds.
fn started() -> usize {
    let said = ["OMPI_COMM_WORLD_SIZE", "PMI_SIZE"].into_iter().find_map(|name| std::env::var(name).ok());
    said.and_then(|count| count.parse().ok()).unwrap_or(1)
}

#[cfg(not(feature = "mpi"))]
impl Ranks {
    /// The processes that were started with this one; `None` if it is alone.
    pub fn join() -> Result<Option<Self>> {
        let count = started();
        if count > 1 {
            anyhow::bail!("mpirun started {count} processes of a longspan without MPI; build it with --features mpi");
        }
        Ok(None)
    }

    /// How many there are.
    pub fn count(&self) -> usize {
        match *self {}
    }
}

#[cfg(feature = "mpi")]
use mpi::traits::{Communicator, Destination, Root, Source};

#[cfg(feature = "mpi")]
impl Ranks {
    /// The processes that were started with this one; `None` if it is alone.
    pub fn join() -> Result<Option<Self>> {
        if started() < 2 {
            return Ok(None);
        }
        let universe = mpi::initialize_with_threading(mpi::Threading::Funneled);
        let (universe, _) =
            universe.ok_or_else(|| anyhow::anyhow!("MPI was started twice; this is a bug: report it"))?;
        Ok(Some(Self(universe)))
    }

    /// This process's number.
    pub fn rank(&self) -> usize {
        self.0.world().rank() as usize
    }

    /// How many there are.
    pub fn count(&self) -> usize {
        self.0.world().size() as usize
    }

    /// Tells all others, from rank 0.
    pub fn announce(&self, message: &[u8]) {
        for rank in 1..self.count() {
            self.0.world().process_at_rank(rank as i32).send(message);
        }
    }

    /// Waits for what rank 0 announces. MPI would wait at full speed, on cores that rank 0 may need.
    pub fn hear(&self) -> Vec<u8> {
        let world = self.0.world();
        let first = world.process_at_rank(0);
        while first.immediate_probe().is_none() {
            std::thread::sleep(std::time::Duration::from_micros(100));
        }
        first.receive_vec::<u8>().0
    }

    /// Gives the numbers of rank 0 to all.
    pub fn spread(&self, numbers: &mut [f32]) {
        self.0.world().process_at_rank(0).broadcast_into(numbers);
    }

    /// Tells rank 0.
    pub fn reply(&self, message: &[u8]) {
        self.0.world().process_at_rank(0).send(message);
    }

    /// What a rank replied.
    pub fn answer_of(&self, rank: usize) -> Vec<u8> {
        self.0.world().process_at_rank(rank as i32).receive_vec::<u8>().0
    }

    /// Gives numbers to rank 0.
    pub fn give(&self, numbers: &[f32]) {
        self.0.world().process_at_rank(0).send(numbers);
    }

    /// Takes the numbers of a rank.
    pub fn take(&self, rank: usize, numbers: &mut [f32]) {
        self.0.world().process_at_rank(rank as i32).receive_into(numbers);
    }
}
