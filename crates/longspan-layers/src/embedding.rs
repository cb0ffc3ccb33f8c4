//! Rows of a table, one for each token: `y_r = s E[t_r] + P[r mod n]`, with absolute positions `P` by choice.
//!
//! `dE[t] = s Σ_{r: t_r = t} dy_r`, in the order of tokens: threads share the rows of the table, not the tokens.

use super::products::{Fresh, try_zeros};
use longspan_core::error::{Error, expect};
use longspan_core::simd::block::add_scaled;
use longspan_core::threads::share;

/// Numbers of a task forward.
const PIECE: usize = 1 << 16;

/// Parts of the table backward, each of which looks at all tokens.
const PARTS: usize = 16;

/// One look-up.
#[derive(Debug, Clone, Copy)]
pub struct Embedding<'a> {
    /// `E`, `[vocabulary, width]`.
    pub table: &'a [f32],
    /// Numbers of a row.
    pub width: usize,
    /// `t`: the row of each token.
    pub tokens: &'a [usize],
    /// `s`.
    pub scale: f32,
    /// `P`, `[n, width]`, of sequences of `n` tokens that follow each other; empty for none.
    pub positions: &'a [f32],
}

const OPERATION: &str = "embedding";

impl Embedding<'_> {
    fn check(&self) -> Result<(), Error> {
        let width = self.width;
        expect(width > 0, OPERATION, "width", || "at least 1".into(), || width.to_string())?;
        for (name, numbers) in [("table", self.table), ("positions", self.positions)] {
            let rows = numbers.len().is_multiple_of(width);
            let got = || format!("{} numbers", numbers.len());
            expect(rows, OPERATION, name, || format!("rows of {width} numbers"), got)?;
        }
        let (got, own) = (self.tokens.len(), self.positions.len() / width);
        let whole = own == 0 || got.is_multiple_of(own);
        expect(whole, OPERATION, "tokens", || format!("sequences of {own}, as positions"), || got.to_string())?;
        let vocabulary = self.table.len() / width;
        let beyond = self.tokens.iter().find(|&&token| token >= vocabulary);
        let got = || beyond.map_or(String::new(), usize::to_string);
        expect(beyond.is_none(), OPERATION, "tokens", || format!("entries below {vocabulary}"), got)
    }

    /// A row for each token, `[tokens, width]`.
    ///
    /// # Errors
    /// Lengths that do not fit, tokens beyond the table, and memory that is not there.
    pub fn forward(&self) -> Result<Vec<f32>, Error> {
        self.check()?;
        let mut out = Fresh::new(self.tokens.len().saturating_mul(self.width))?;
        let rows = (PIECE / self.width).max(1);
        let pieces = self.tokens.chunks(rows).zip(out.room().chunks_mut(rows * self.width)).enumerate();
        share(pieces, |(n, (tokens, out))| {
            for (r, (&token, out)) in tokens.iter().zip(out.chunks_exact_mut(self.width)).enumerate() {
                let row = &self.table[token * self.width..][..self.width];
                let out = out.write_copy_of_slice(row);
                if self.scale != 1.0 {
                    out.iter_mut().for_each(|x| *x *= self.scale);
                }
                if !self.positions.is_empty() {
                    let first = (n * rows + r) * self.width % self.positions.len();
                    add_scaled(out, 1.0, &self.positions[first..][..self.width]);
                }
            }
        });
        // SAFETY: every row has been written.
        Ok(unsafe { out.written() })
    }

    /// The gradient of the table, `[vocabulary, width]`, from that of the result.
    ///
    /// # Errors
    /// As [`forward`](Self::forward), and a gradient of another length than the result.
    pub fn backward(&self, d_out: &[f32]) -> Result<Vec<f32>, Error> {
        self.check()?;
        let (got, len) = (d_out.len(), self.tokens.len() * self.width);
        expect(got == len, OPERATION, "d_out", || format!("{len} numbers"), || got.to_string())?;
        let mut d_table = try_zeros(self.table.len())?;
        let rows = (d_table.len() / self.width).div_ceil(PARTS).max(1);
        share(d_table.chunks_mut(rows * self.width).enumerate(), |(n, part)| {
            for (token, d) in self.tokens.iter().zip(d_out.chunks_exact(self.width)) {
                let row = token.wrapping_sub(n * rows);
                if row < rows {
                    add_scaled(&mut part[row * self.width..][..self.width], self.scale, d);
                }
            }
        });
        Ok(d_table)
    }
}
