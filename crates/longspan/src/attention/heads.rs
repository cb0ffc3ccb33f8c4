//! How many heads a mechanism has and how wide they are.

use longspan_kernels::Dims;

use crate::error::{Result, config, fits};

/// Numbers of heads and their width.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Heads {
    /// Query heads, a multiple of `kv_heads`.
    pub heads: usize,
    /// Key/value heads.
    pub kv_heads: usize,
    /// Numbers in a query of one head.
    pub head_dim: usize,
}

impl Heads {
    /// Checks the sizes of the configuration `name`; as many key/value heads as query heads if not given.
    ///
    /// # Errors
    /// Heads that do not divide, a width of 0.
    pub(super) fn new(name: &'static str, heads: usize, kv_heads: Option<usize>, head_dim: usize) -> Result<Self> {
        let kv_heads = kv_heads.unwrap_or(heads);
        config(head_dim > 0, name, "head_dim", "at least 1", head_dim)?;
        config(
            kv_heads > 0 && heads > 0 && heads.is_multiple_of(kv_heads),
            name,
            "kv_heads",
            format_args!("a divisor of the {heads} heads"),
            kv_heads,
        )?;
        fits(name, "head_dim", &[heads, head_dim])?;
        Ok(Self { heads, kv_heads, head_dim })
    }

    /// The sizes of a call, with values as wide as queries.
    pub(crate) fn dims(self, batch: usize, queries: usize, keys: usize) -> Dims {
        let Self { heads, kv_heads, head_dim } = self;
        Dims { batch, heads, kv_heads, queries, keys, head_dim, value_dim: head_dim }
    }
}
