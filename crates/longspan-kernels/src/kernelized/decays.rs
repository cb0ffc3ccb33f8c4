//! How the weight of a key falls with the tokens after it: not at all, by a constant factor, or by one that each token brings.

use super::KernelizedAttention;
use crate::call::Arena;
use crate::simd::Real;
use crate::simd::block::{decay_by, multiply};

#[derive(Debug, Clone, Copy)]
pub(super) enum Decay<'a, T> {
    /// Not at all.
    None,
    /// By the same factor with every token up to `end`. Rows that stand beyond see all keys from there where they are divided by the sum of
    /// their weights: what else they would fall by is common to all, and could erase them.
    Constant { gamma: f64, end: isize },
    /// By a factor with each key; by none before the first and after the last.
    Gates(&'a [T]),
}

impl<T: Real> Decay<'_, T> {
    pub fn is_none(&self) -> bool {
        matches!(self, Self::None)
    }

    /// What a weight at token `from` is multiplied by at `to`, which is no earlier.
    pub fn between(&self, from: isize, to: isize) -> T {
        match *self {
            Self::None => T::ONE,
            Self::Constant { gamma, end } => T::from_f64(gamma.powf((to.min(end) - from.min(end)) as f64)),
            Self::Gates(factors) => {
                let place = |token: isize| (token + 1).clamp(0, factors.len() as isize) as usize;
                let seen = &factors[place(from)..place(to).max(place(from))];
                seen.iter().fold(T::ONE, |product, &factor| fall(product, factor))
            }
        }
    }

    /// The same over two ranges beside each other, given what a weight falls by over each of them: no product of gates is formed twice.
    pub fn over_both(&self, [one, other]: [T; 2], (from, to): (isize, isize)) -> T {
        if let Self::Gates(_) = self { fall(one, other) } else { self.between(from, to) }
    }

    /// What a weight falls by from each of the tokens from `first` on to the next.
    pub fn steps(&self, first: isize, to: &mut [T]) {
        let step = self.power(1);
        for (to, token) in to.iter_mut().zip(first..) {
            *to = match self {
                Self::Gates(_) => self.between(token, token + 1),
                _ if token < self.end() => step,
                _ => T::ONE,
            };
        }
    }

    /// What a weight falls by over so many tokens of a call.
    pub fn power(&self, tokens: usize) -> T {
        if let Self::Constant { gamma, .. } = *self { T::from_f64(gamma.powf(tokens as f64)) } else { T::ONE }
    }

    /// The token up to which weights fall.
    fn end(&self) -> isize {
        if let Self::Constant { end, .. } = *self { end } else { isize::MAX }
    }

    /// What the sums of a state fall by until token 0 is there. Under a constant decay they have already.
    pub fn entry(&self) -> T {
        if let Self::Gates(_) = self { self.between(-1, 0) } else { T::ONE }
    }
}

/// A product that ends at 0 before it loses its digits, and slows the processor down.
fn fall<T: Real>(x: T, factor: T) -> T {
    let product = x * factor;
    if product.vanishes() { T::ZERO } else { product }
}

/// The decays among the rows and keys of a piece.
pub(super) struct Decays<'s, T> {
    /// From the first token to each of the next ones.
    pub from_start: &'s mut [T],
    /// From each token to the one after the last.
    pub to_end: &'s mut [T],
    /// `γⁿ` for n from its length down to 0, or rows × columns of gates.
    table: &'s mut [T],
    columns: usize,
    /// The columns before that of the first row.
    lead: usize,
    /// Rows from this one on, which may be negative, see keys as it does.
    last_row: isize,
    gates: bool,
}

impl<'s, T: Real> Decays<'s, T> {
    /// For pieces of at most `chunk` tokens, and tiles of `rows` by `columns`; nothing where there is no decay.
    pub fn new(
        attention: &KernelizedAttention,
        chunk: usize,
        [rows, columns]: [usize; 2],
        arena: &mut Arena<'s, T>,
    ) -> Self {
        let (len, gates) = (|len: usize| if attention.decays() { len } else { 0 }, attention.gate);
        Self {
            from_start: arena.take(len(chunk)),
            to_end: arena.take(len(chunk)),
            table: arena.take(len(if gates { rows * columns } else { rows + columns })),
            columns,
            lead: 0,
            last_row: 0,
            gates,
        }
    }

    pub fn start(&mut self, decay: Decay<'_, T>) {
        if !self.gates {
            self.table.iter_mut().rev().zip(0..).for_each(|(power, n)| *power = decay.power(n));
        }
    }

    /// Lays out the decays of the tokens `first..first + count`, and of a tile whose first `rows` rows stand at `first` and after, and
    /// whose columns begin `lead` keys before.
    pub fn load(
        &mut self,
        decay: Decay<'_, T>,
        first: isize,
        count: usize,
        (rows, lead, columns): (usize, usize, usize),
    ) {
        (self.lead, self.last_row) = (lead, decay.end().saturating_sub(first));
        let Decay::Gates(_) = decay else {
            // Empty where no unit decays, and all 1 where others do.
            let power = |n: usize| self.table[self.table.len() - 1 - n];
            let falling = self.last_row.clamp(0, count as isize) as usize;
            for n in 0..count.min(self.from_start.len()) {
                self.from_start[n] = power(n.min(falling));
                self.to_end[n] = power(falling - n.min(falling));
            }
            return;
        };
        let step = |token: isize| decay.between(token - 1, token);
        let mut product = T::ONE;
        for (n, to) in self.from_start[..count].iter_mut().enumerate() {
            if n > 0 {
                product = fall(product, step(first + n as isize));
            }
            *to = product;
        }
        let mut product = T::ONE;
        for (n, to) in self.to_end[..count].iter_mut().enumerate().rev() {
            product = fall(product, step(first + n as isize + 1));
            *to = product;
        }
        if rows == 0 {
            return;
        }
        let mut product = T::ONE;
        self.table[lead..columns].fill(T::ONE);
        for (n, to) in self.table[..lead.min(columns)].iter_mut().enumerate().rev() {
            product = fall(product, step(first - (lead - n) as isize + 1));
            *to = product;
        }
        for row in 1..rows {
            let (before, line) = self.table[(row - 1) * self.columns..].split_at_mut(self.columns);
            // Those of later keys, which the row does not see, stay 1.
            let seen = (lead + row).min(columns);
            line[..seen].copy_from_slice(&before[..seen]);
            line[seen..columns].fill(T::ONE);
            decay_by(&mut line[..seen], step(first + row as isize));
        }
    }

    /// Over all tokens that are laid out, to the one after the last.
    pub fn total(&self) -> T {
        self.to_end.first().copied().unwrap_or(T::ONE)
    }

    /// The decays from each of the first `columns` keys of the tile to row `row`, as far as it sees them.
    pub fn row(&self, row: usize, columns: usize) -> &[T] {
        let behind = (self.last_row.min(row as isize) + self.lead as isize + 1).max(0) as usize;
        let seen = behind.min(columns);
        let start = if self.gates { row * self.columns } else { self.table.len() - behind };
        &self.table[start..][..seen]
    }

    /// The decays over `radius` tokens from `first` on and from those after it: for gates those in column `n` of row `row + n` of the tile,
    /// which lack the factor of token `missing + n`.
    pub fn over(
        &self,
        decay: Decay<'_, T>,
        (first, radius): (isize, usize),
        (row, missing): (usize, isize),
        to: &mut [T],
    ) {
        if !self.gates || radius == 0 {
            let (all, reach) = (decay.power(radius), radius as isize);
            let over =
                |token: isize| if token + reach <= decay.end() { all } else { decay.between(token, token + reach) };
            return (first..).zip(to).for_each(|(token, to)| *to = over(token));
        }
        for (n, to) in to.iter_mut().enumerate() {
            let missing = missing + n as isize;
            *to = fall(self.row(row + n, n + 1)[n], decay.between(missing - 1, missing));
        }
    }

    /// Multiplies the weights of a tile's first `rows` rows and `columns` columns.
    pub fn apply(&self, (tile, row_length): (&mut [T], usize), rows: usize, columns: usize) {
        for row in 0..rows {
            let decays = self.row(row, columns);
            multiply(&mut tile[row * row_length..][..decays.len()], decays);
        }
    }
}
