//! The processes that `mpirun` started together. Rank 0 holds the run; the others do what it says.

use std::ops::Range;
use std::sync::Arc;

use anyhow::{Result, bail};
use longspan::backend::Peers;

#[cfg(feature = "mpi")]
use crate::terminal::notes::note;

/// The processes, as this one sees them; there are none in a build without MPI.
#[cfg(not(feature = "mpi"))]
pub enum Ranks {}

/// The processes, as this one sees them.
#[cfg(feature = "mpi")]
pub struct Ranks(mpi::environment::Universe);

fn number(name: &str) -> Option<usize> {
    std::env::var(name).ok()?.parse().ok()
}

/// How many processes MPI started, by the words of Open MPI, of PMI (MPICH, Intel, `srun --mpi=pmi2`) and of `srun --mpi=pmix`.
fn started_by_mpi() -> Option<usize> {
    let slurm = || number("SLURM_STEP_NUM_TASKS").filter(|_| number("SLURM_PROCID").and(number("PMIX_RANK")).is_some());
    number("OMPI_COMM_WORLD_SIZE").or_else(|| number("PMI_SIZE")).or_else(slurm)
}

/// For what is not shared among processes.
///
/// # Errors
/// Processes that MPI started together: each would do and print the same.
pub fn alone() -> Result<()> {
    let Some(count @ 2..) = started_by_mpi() else { return Ok(()) };
    let rank = ["OMPI_COMM_WORLD_RANK", "PMI_RANK", "PMIX_RANK"].into_iter().find_map(number);
    if rank.unwrap_or(0) > 0 {
        // The first one says it for all.
        std::process::exit(1);
    }
    bail!(
        "mpirun started {count} processes, and each would do the same: only `train` shares its work; start one without mpirun"
    )
}

/// How many processes train together.
///
/// # Errors
/// Processes that `torchrun` or `srun` started together without MPI: each would train the same.
fn started() -> Result<usize> {
    if let Some(count) = started_by_mpi() {
        return Ok(count);
    }
    let srun = number("SLURM_STEP_NUM_TASKS").zip(number("SLURM_PROCID"));
    let torchrun = number("WORLD_SIZE").zip(number("RANK"));
    for (launcher, mend, found) in
        [("torchrun", "start them with mpirun -n", torchrun), ("srun", "start them with srun --mpi=pmix -n", srun)]
    {
        match found {
            Some((2.., 1..)) => std::process::exit(1),
            Some((count @ 2.., _)) => bail!(
                "{launcher} started {count} processes without MPI, and each would train the same; {mend} {count}, or start one"
            ),
            _ => {}
        }
    }
    Ok(1)
}

/// Which of `count` examples are those of a rank: as many as the others', but for the last.
pub fn share(count: usize, rank: usize, ranks: usize) -> Range<usize> {
    let each = count.div_ceil(ranks);
    (rank * each).min(count)..((rank + 1) * each).min(count)
}

#[cfg(not(feature = "mpi"))]
impl Ranks {
    /// The processes that were started with this one; `None` if it is alone.
    pub fn join() -> Result<Option<Self>> {
        let count = started()?;
        if count > 1 {
            bail!("mpirun started {count} processes of a longspan without MPI; build it with --features mpi");
        }
        Ok(None)
    }

    pub fn count(&self) -> usize {
        match *self {}
    }

    /// The processes as those that hold the stretches of a sequence.
    pub fn peers(&self) -> Arc<dyn Peers> {
        match *self {}
    }
}

#[cfg(feature = "mpi")]
use mpi::traits::{Communicator, CommunicatorCollectives, Destination, Source};

/// Waits for other ranks that began or ended: odd while this one waits.
#[cfg(feature = "mpi")]
static WAITS: std::sync::atomic::AtomicUsize = std::sync::atomic::AtomicUsize::new(0);

/// What others are to answer within the time of [`Ranks::watch`].
#[cfg(feature = "mpi")]
pub fn awaited<T>(answer: impl FnOnce() -> T) -> T {
    WAITS.fetch_add(1, std::sync::atomic::Ordering::Relaxed);
    let answer = answer();
    WAITS.fetch_add(1, std::sync::atomic::Ordering::Relaxed);
    answer
}

#[cfg(feature = "mpi")]
#[derive(Debug)]
struct World {
    rank: usize,
    count: usize,
}

#[cfg(feature = "mpi")]
impl Peers for World {
    fn rank(&self) -> usize {
        self.rank
    }

    fn count(&self) -> usize {
        self.count
    }

    fn gather(&self, numbers: &[f32]) -> Vec<Vec<f32>> {
        let mut all = vec![0.0_f32; numbers.len() * self.count];
        awaited(|| mpi::topology::SimpleCommunicator::world().all_gather_into(numbers, &mut all[..]));
        all.chunks(numbers.len().max(1)).map(<[f32]>::to_vec).collect()
    }
}

#[cfg(feature = "mpi")]
impl Ranks {
    /// The processes that were started with this one; `None` if it is alone.
    pub fn join() -> Result<Option<Self>> {
        if started()? < 2 {
            return Ok(None);
        }
        // A sequence's states are exchanged from whichever thread computes it, while all others wait.
        let universe = mpi::initialize_with_threading(mpi::Threading::Serialized);
        let (universe, threading) =
            universe.ok_or_else(|| anyhow::anyhow!("MPI was started twice; this is a bug: report it"))?;
        if [mpi::Threading::Single, mpi::Threading::Funneled].contains(&threading) {
            bail!("this MPI takes calls from one thread alone; install one that was built with support for threads");
        }
        Ok(Some(Self(universe)))
    }

    pub fn rank(&self) -> usize {
        self.0.world().rank() as usize
    }

    pub fn count(&self) -> usize {
        self.0.world().size() as usize
    }

    /// Ends all processes once this one has waited too long for another: MPI waits for ever for one that is stopped or out of reach. It
    /// counts its own seconds, so that a job that is suspended as a whole goes on.
    pub fn watch(&self) -> Result<()> {
        const USUAL: usize = 30 * 60;
        let rank = self.rank();
        let limit = match std::env::var("LONGSPAN_RANK_TIMEOUT") {
            Ok(text) => text.parse().ok().filter(|limit| *limit > 0).ok_or_else(|| {
                anyhow::anyhow!("LONGSPAN_RANK_TIMEOUT: expected a whole number of seconds, at least 1, got \"{text}\"")
            })?,
            Err(_) => USUAL,
        };
        std::thread::spawn(move || {
            let (mut before, mut waited) = (0, 0);
            // The first rank that waits says it for all.
            while waited < limit + 2 * rank {
                std::thread::sleep(std::time::Duration::from_secs(1));
                let waits = WAITS.load(std::sync::atomic::Ordering::Relaxed);
                waited = if waits % 2 == 1 && waits == before { waited + 1 } else { 0 };
                before = waits;
            }
            note(format_args!(
                "error: rank {rank}: another process gave no answer for {limit} seconds: it is stopped or out of reach; go on from the \
                 last checkpoint with --resume, and for longer waits set LONGSPAN_RANK_TIMEOUT"
            ));
            std::process::exit(1);
        });
        Ok(())
    }

    pub fn announce(&self, message: &[u8]) {
        for rank in 1..self.count() {
            awaited(|| self.0.world().process_at_rank(rank as i32).send(message));
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

    pub fn reply(&self, message: &[u8]) {
        awaited(|| self.0.world().process_at_rank(0).send(message));
    }

    pub fn answer_of(&self, rank: usize) -> Vec<u8> {
        awaited(|| self.0.world().process_at_rank(rank as i32).receive_vec::<u8>().0)
    }

    /// Leaves with all ranks the sums of their numbers, which are equally many. Each rank adds up a piece of them, from rank 0's to the
    /// last one's, so that the bits do not depend on who comes first, and no rank hears more than the others.
    pub fn sum(&self, numbers: &mut Vec<f32>) {
        let (world, count, len) = (self.0.world(), self.count(), numbers.len());
        let piece = len.div_ceil(count);
        numbers.resize(piece * count, 0.0);
        let mut heard = vec![0.0_f32; piece * count];
        awaited(|| world.all_to_all_into(&numbers[..], &mut heard[..]));
        let (sum, others) = heard.split_at_mut(piece);
        for other in others.chunks_exact(piece.max(1)) {
            sum.iter_mut().zip(other).for_each(|(sum, x)| *sum += x);
        }
        awaited(|| world.all_gather_into(&*sum, &mut numbers[..]));
        numbers.truncate(len);
    }

    /// The processes as those that hold the stretches of a sequence.
    pub fn peers(&self) -> Arc<dyn Peers> {
        Arc::new(World { rank: self.rank(), count: self.count() })
    }

    /// Ends all processes: what else they wait for does not come.
    pub fn abort(&self) -> ! {
        self.0.world().abort(1)
    }
}
