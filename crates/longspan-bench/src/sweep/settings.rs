//! What a sweep measures.

use longspan_kernels::{Dims, Order};
use serde::{Deserialize, Serialize};

use crate::conformance::order_name;
use crate::error::Error;
use crate::workload::Pass;

/// Sizes and limits of a sweep.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Settings {
    /// What the rows are for: `sweep`, or the name of a published figure.
    pub set: String,
    /// Independent sequences.
    pub batch: usize,
    /// Heads.
    pub heads: usize,
    /// Numbers in one query, key or value of one head.
    pub head_dim: usize,
    /// The lengths double from here …
    pub min_length: usize,
    /// … up to here.
    pub max_length: usize,
    /// What is timed.
    pub passes: Vec<Pass>,
    /// Causal, bidirectional or both.
    pub orders: Vec<OrderName>,
    /// Time spent on each point, in seconds; three runs at least.
    pub seconds_per_point: f64,
    /// A series ends before a call is expected to take longer than this, in seconds.
    pub longest_call: f64,
    /// A series ends before it would need more than this, in bytes.
    pub memory_limit: usize,
    /// Also time calls whose outputs are allocated anew each time.
    pub fresh: bool,
}

impl Default for Settings {
    fn default() -> Self {
        Self {
            set: "sweep".to_owned(),
            batch: 1,
            heads: 8,
            head_dim: 64,
            min_length: 1 << 5,
            max_length: 1 << 17,
            passes: Pass::ALL.to_vec(),
            orders: vec![OrderName::Causal, OrderName::Bidirectional],
            seconds_per_point: 0.15,
            longest_call: 1.0,
            memory_limit: 4 << 30,
            fresh: true,
        }
    }
}

/// [`Order`] as tables name it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum OrderName {
    /// Every query sees the keys up to its own.
    Causal,
    /// Every query sees every key.
    Bidirectional,
}

impl OrderName {
    /// As kernels take it.
    pub fn order(self) -> Order {
        match self {
            Self::Causal => Order::Causal,
            Self::Bidirectional => Order::Bidirectional,
        }
    }

    /// As tables show it.
    pub fn name(self) -> &'static str {
        order_name(self.order())
    }
}

/// Lengths from one to another, each twice the one before.
pub(crate) fn doubling(from: usize, to: usize) -> Vec<usize> {
    std::iter::successors(Some(from), |length| length.checked_mul(2)).take_while(|&length| length <= to).collect()
}

impl Settings {
    /// Whether there is something to measure.
    ///
    /// # Errors
    /// Names the setting that leaves nothing.
    pub fn check(&self) -> Result<(), Error> {
        let sizes = [
            ("--batch", self.batch),
            ("--heads", self.heads),
            ("--dim", self.head_dim),
            ("--min-length", self.min_length),
        ];
        let sizes = sizes.map(|(setting, size)| (setting, size > 0, size.to_string(), "at least 1"));
        let longest = self.max_length;
        let lengths = ("--max-length", longest >= self.min_length, longest.to_string(), "at least the shortest length");
        let times = [("--seconds", self.seconds_per_point), ("--longest-call", self.longest_call)];
        let times =
            times.map(|(setting, x)| (setting, x.is_finite() && x > 0.0, x.to_string(), "a positive time in seconds"));
        match sizes.into_iter().chain([lengths]).chain(times).find(|(_, fine, ..)| !fine) {
            Some((setting, _, got, expected)) => Err(Error::Setting { setting, got, expected }),
            None => Ok(()),
        }
    }

    pub(super) fn lengths(&self) -> Vec<usize> {
        doubling(self.min_length, self.max_length)
    }

    pub(super) fn dims(&self, length: usize) -> Dims {
        Dims::square(self.batch, self.heads, length, self.head_dim)
    }
}
