//! Means over windows with many biases, as matrix products.
//!
//! In a tile of outputs `i` and items `j` where every output sees every item, `Σ_j e^{x_j+w_ij}·(n_j, d_j)` of all channels
//! is one matrix product: `e^{w_ij − r_i}`, relative to its largest in the row, times `e^{x_j − m}·(n_j, d_j)`, relative to
//! the channel's largest. What it gives is joined to the outputs' running means under the exponent `r_i + m`.
//!
//! That exponent may be larger than any that occurs, since `r_i` and `m` may stem from different items, by no more than
//! the smaller of the two ranges. A tile whose ranges are both beyond [`widest`] is cut into smaller ones, and at last taken
//! pair by pair.

use std::ops::Range;

use super::chunks::Window;
use super::items::{BlockParts, Items, REACH, panel, transpose};
use super::log_sum::{BiasGradient, Factored, Factors, JoinFactored, PARTS, ProjectRows, RaiseRows, clear, join};
use super::walk::{Biases, Outputs, walk};
use crate::call::Arena;
use crate::simd::block::{add_products, exponentials, floor};
use crate::simd::product::Product;
use crate::simd::{Real, dispatch};
use crate::threads;

/// A kept tile of biases begins so many columns after its chunk's first, or a multiple of that.
pub(super) const GRID: usize = 64;

/// A tile of so many rows and columns, or fewer, is not cut.
const LEAF: usize = 8;

/// Tiles with fewer rows or columns are taken pair by pair.
const LEAST: usize = 4;

/// How large the smaller range of a tile's exponents may be.
///
/// Exponentials below the least normal number are lost. Sums are relative to an exponent that is at most this much too
/// large, and so is the sum of the means that the backward divides by: what is lost is then below `e^{2·widest}` times the
/// least normal number, 10⁻¹⁷ of the largest term (`f32`).
pub(super) fn widest<T: Real>() -> T {
    T::from_f64(-0.275 * T::MIN_POSITIVE.to_f64().ln())
}

struct Work<'w, T> {
    /// A tile of biases, and room for its transpose.
    biases: &'w mut [T],
    turned: &'w mut [T],
    running_max: &'w mut [T],
    sums: ChunkSums<'w, T>,
    side: ItemWork<'w, T>,
}

/// Sums over tiles of a whole chunk whose items have one exponent a channel in common.
struct ChunkSums<'w, T> {
    numerators: &'w mut [T],
    denominators: &'w mut [T],
    /// The largest bias of each row so far, which they are relative to.
    running_max: &'w mut [T],
    begun: bool,
}

/// What a tile's items take of it.
struct ItemWork<'w, T> {
    /// The means of a chunk, or rows relative to a tile's keys.
    rows: &'w mut [T],
    items: &'w mut [T],
    reference: &'w mut [T],
    /// Numerators and denominators of items.
    factored: &'w mut [T],
    /// Products, and factors turned round: two blocks of a tile's rows, or columns.
    products: &'w mut [T],
}

impl<'w, T: Real> Work<'w, T> {
    fn new(arena: &mut Arena<'w, T>, mean: usize, chunk_len: usize) -> Self {
        let width = mean / PARTS;
        Self {
            biases: arena.take(chunk_len * REACH),
            turned: arena.take(chunk_len * REACH),
            running_max: arena.take(chunk_len),
            sums: ChunkSums {
                numerators: arena.take(chunk_len * width),
                denominators: arena.take(chunk_len * width),
                running_max: arena.take(chunk_len),
                begun: false,
            },
            side: ItemWork {
                rows: arena.take(chunk_len * mean),
                items: arena.take(REACH * mean),
                reference: arena.take(2 * width),
                factored: arena.take(2 * REACH * width),
                products: arena.take(2 * REACH * width),
            },
        }
    }
}

impl<T: Real> ChunkSums<'_, T> {
    /// Adds a tile of a block of items. Where a row's bias was larger before, the sums are joined to `rows` first and begun anew.
    fn add(&mut self, rows: &mut [T], reference: &[T], tile: &BiasTile<'_, T>, items: Factored<'_, T>, columns: usize) {
        let (count, width) = (tile.running_max.len(), reference.len() / 2);
        let later = self.running_max.iter().zip(tile.running_max).all(|(own, new)| own <= new);
        if !later {
            self.join(rows, reference, count);
        }
        let Self { numerators, denominators, running_max, begun } = self;
        let sums = [numerators, denominators].map(|sums| &mut sums[..count * width]);
        let running_max = &mut running_max[..count];
        if *begun {
            dispatch(RaiseRows { sums, from: running_max, to: tile.running_max });
        }
        running_max.copy_from_slice(tile.running_max);
        for (b, c) in [(items.numerators, &mut *self.numerators), (items.denominators, &mut *self.denominators)] {
            let product = Product::of((tile.weights, tile.row), (b, width), (c, width), [count, width, columns]);
            product.accumulate(*begun).b_goes_on().compute();
        }
        *begun = true;
    }

    /// Joins them to the first `count` rows, if there are any.
    fn join(&mut self, rows: &mut [T], reference: &[T], count: usize) {
        if std::mem::take(&mut self.begun) {
            let from = Factored { reference, numerators: self.numerators, denominators: self.denominators };
            dispatch(JoinFactored { to: rows, from, biases: &self.running_max[..count] });
        }
    }
}

impl<T: Real> ItemWork<'_, T> {
    /// Writes `[e^{x_i + m + r_i}·(g/d, −G·Y/d)]·[e^{k_j − m}·(v_j, 1)]ᵀ` of a tile's rows and items, or adds it to the terms of
    /// other heads that were `begun`. Returns whether the tile's exponents allow it.
    fn add_terms(
        &mut self,
        tile: &BiasTile<'_, T>,
        (items, from, columns): (&impl Items<T>, isize, usize),
        rows: &[T],
        begun: bool,
        terms: &mut [T],
    ) -> bool {
        let width = self.reference.len() / 2;
        let block = items.blocks().and_then(|blocks| blocks.get(from, columns));
        let BlockParts { reference, factors: keys, range: depth } = block.unwrap_or_else(|| {
            let (numerators, denominators) = self.factored.split_at_mut(REACH * width);
            let to = Factors { reference: self.reference, numerators, denominators };
            let range = items.factor(from, columns, to, self.items);
            transpose(self.factored, self.products, width, columns);
            BlockParts { reference: self.reference, factors: self.products, range }
        });
        if tile.range > widest() && depth > widest() {
            return false;
        }
        dispatch(ProjectRows { rows, reference, biases: tile.running_max, to: self.rows });
        let (depth, panel) = (2 * width, panel::<T>());
        for (keys, first) in keys.chunks_exact(depth * panel).zip((0..columns).step_by(panel)) {
            let sizes = [tile.running_max.len(), panel.min(columns - first), depth];
            let product = Product::of((&*self.rows, depth), (keys, panel), (&mut terms[first..], REACH), sizes);
            product.accumulate(begun).b_goes_on().compute();
        }
        true
    }
}

/// Numbers of working memory that [`means`] and [`bias_gradients`] take.
pub(super) fn work_len<T: Real>(mean: usize, chunk_len: usize) -> usize {
    Arena::measure(|arena| Work::<T>::new(arena, mean, chunk_len))
}

/// `e^{w − r}` of a chunk's whole tiles, `r` the largest of each row, in blocks of [`REACH`] columns the largest so far: the biases of a
/// table are the same for all heads, so that a walk over several heads forms them once.
pub(super) struct BiasTiles<'w, T> {
    rows: usize,
    tiles: &'w mut [T],
    /// For each [`GRID`] columns, at the first of a tile: the largest of its rows,
    running_max: &'w mut [T],
    /// the largest range of any of them,
    ranges: &'w mut [T],
    /// and how many columns it has; 0 where no tile begins.
    lengths: &'w mut [T],
    /// For each block of [`REACH`] columns: the largest of its rows up to its end. It stays when other tiles take the block's place, so
    /// that a tile does not depend on which heads came before.
    so_far: &'w mut [T],
}

impl<'w, T: Real> BiasTiles<'w, T> {
    /// Of nothing yet, for chunks of so many rows, in as much memory as [`bias_tiles_len`] says; `None` without any.
    pub fn new(memory: &'w mut [T], rows: usize) -> Option<Self> {
        let count = memory.len().checked_sub(64)? / grid_len(rows);
        let mut arena = Arena::new(memory);
        let bias_tiles = Self {
            rows,
            tiles: arena.take(count * rows * GRID),
            running_max: arena.take(count * rows),
            ranges: arena.take(count),
            lengths: arena.take(count),
            so_far: arena.take(count.div_ceil(REACH / GRID) * rows),
        };
        bias_tiles.lengths.fill(T::ZERO);
        bias_tiles.so_far.fill(floor());
        Some(bias_tiles)
    }
}

/// Numbers that [`GRID`] columns of a [`BiasTiles`] take.
fn grid_len(rows: usize) -> usize {
    rows * GRID + 2 * rows + 2
}

/// Numbers of memory of a [`BiasTiles`] for the chunks of a window.
pub(super) fn bias_tiles_len(window: &Window) -> usize {
    let reach = (window.chunk_len + window.back as usize).saturating_add(window.ahead as usize);
    reach.min((window.end - window.first).max(0) as usize).div_ceil(GRID) * grid_len(window.chunk_len) + 64
}

/// `e^{w − r}` of some outputs and items.
struct BiasTile<'a, T> {
    weights: &'a [T],
    /// From one row of them to the next.
    row: usize,
    /// `r`, one for each row.
    running_max: &'a [T],
    /// The largest range of biases of any row.
    range: T,
}

/// One of the chunk's tiles, which begins so many items after its first, if it is whole; or formed in the task's own memory.
fn bias_tile<'a, T: Real>(
    biases: &Biases<'_, T>,
    (outputs, from, to): (Range<usize>, isize, isize),
    kept: Option<(&'a mut BiasTiles<'_, T>, usize)>,
    (weights, running_max): (&'a mut [T], &'a mut [T]),
    spare: &mut [T],
) -> BiasTile<'a, T> {
    let (count, columns) = (outputs.len(), (to - from) as usize);
    let Some((bias_tiles, place)) = kept.filter(|(_, place)| place.is_multiple_of(GRID)) else {
        biases.tile(outputs, from, to, weights, REACH, spare);
        running_max.fill(floor());
        let range = exponentials(weights, REACH, columns, running_max);
        return BiasTile { weights, row: REACH, running_max, range };
    };
    let (index, row) = (place / GRID, columns.next_multiple_of(GRID));
    let BiasTiles { rows, tiles, running_max, ranges, lengths, so_far } = bias_tiles;
    let running_max = &mut running_max[index * *rows..][..count];
    let weights = &mut tiles[place * *rows..][..*rows * row];
    if lengths[index] != T::from_f64(columns as f64) {
        biases.tile(outputs, from, to, weights, row, spare);
        running_max.fill(floor());
        let block = place / REACH;
        let whole = place.is_multiple_of(REACH) && columns == REACH;
        if whole && block > 0 {
            running_max.copy_from_slice(&so_far[(block - 1) * *rows..][..count]);
        }
        ranges[index] = exponentials(weights, row, columns, running_max);
        if whole {
            so_far[block * *rows..][..count].copy_from_slice(running_max);
        }
        // It lies where smaller ones may have been, or in a larger one.
        for earlier in (index + 1).saturating_sub(REACH / GRID)..index {
            if lengths[earlier] > T::from_f64((place - earlier * GRID) as f64) {
                lengths[earlier] = T::ZERO;
            }
        }
        lengths[index..index + row / GRID].fill(T::ZERO);
        lengths[index] = T::from_f64(columns as f64);
    }
    BiasTile { weights, row, running_max, range: ranges[index] }
}

/// Some items and the largest range of their exponents: a block of theirs, or formed in `to`.
fn factored<'a, T: Real>(
    block: Option<BlockParts<'a, T>>,
    (items, from, count): (&impl Items<T>, isize, usize),
    to: Factors<'a, T>,
    work: &mut [T],
) -> (Factored<'a, T>, T) {
    if let Some(BlockParts { reference, factors, range }) = block {
        let (numerators, denominators) = factors.split_at(factors.len() / 2);
        return (Factored { reference, numerators, denominators }, range);
    }
    let Factors { reference, numerators, denominators } = to;
    let to = Factors { reference: &mut *reference, numerators: &mut *numerators, denominators: &mut *denominators };
    let depth = items.factor(from, count, to, work);
    (Factored { reference, numerators, denominators }, depth)
}

/// Cuts outputs × items into tiles where every output sees every item, and single pairs. `tile(outputs, from, to, whole)`
/// takes a tile whose pairs are all seen (`whole`) or a small one of which some may not be, and says whether it did.
fn cover(
    window: &Window,
    outputs: Range<usize>,
    from: isize,
    to: isize,
    tile: &mut impl FnMut(Range<usize>, isize, isize, bool) -> bool,
) {
    let (from, to) = (from.max(window.seen(outputs.start).0), to.min(window.seen(outputs.end - 1).1));
    if from >= to {
        return;
    }
    let (rows, columns) = (outputs.len(), (to - from) as usize);
    let whole = window.all_see(&outputs, from, to);
    if whole && rows.min(columns) >= LEAST && tile(outputs.clone(), from, to, true) {
        return;
    }
    if rows.max(columns) <= LEAF {
        tile(outputs, from, to, false);
    } else if rows >= columns {
        let middle = outputs.start + rows / 2;
        cover(window, outputs.start..middle, from, to, tile);
        cover(window, middle..outputs.end, from, to, tile);
    } else {
        // Tiles that are kept, as long as there are some.
        let half = if columns > GRID { (columns / 2).next_multiple_of(GRID) } else { columns / 2 };
        let middle = from + half as isize;
        cover(window, outputs.clone(), from, middle, tile);
        cover(window, outputs, middle, to, tile);
    }
}

/// Forms the mean of every output and hands it to `visit`, as [`walk`] does: in tiles if there are `bias_tiles`, and then without the
/// window's items. They must be of nothing yet, or of the same outputs and biases. Numerators are only formed `with_numerators`.
pub(super) fn means<T: Real>(
    outputs: &Outputs<'_, T, impl Items<T>>,
    with_numerators: bool,
    bias_tiles: Option<&mut BiasTiles<'_, T>>,
    work: &mut [T],
    mut visit: impl FnMut(usize, &[T], isize, &[T]),
) {
    let Some(bias_tiles) = bias_tiles else { return walk(outputs, work, visit) };
    let Outputs { items, biases, window, chunk, edges } = outputs;
    let mean = edges.0.len();
    let width = mean / PARTS;
    let Work { biases: memory, turned, running_max, mut sums, side } =
        Work::new(&mut Arena::new(work), mean, window.chunk_len);
    let common = items.blocks().and_then(|blocks| blocks.common());
    let (own, to) = window.chunk(*chunk);
    let (start, end) = window.range(own, to);
    let chunk_len = to - own;
    let rows = &mut side.rows[..chunk_len * mean];
    for row in rows.chunks_exact_mut(mean) {
        if window.before { row.copy_from_slice(edges.0) } else { clear(row) }
    }
    let mut tile = |outputs: Range<usize>, from: isize, to: isize, whole: bool| {
        let (count, columns) = (outputs.len(), (to - from) as usize);
        let rows = &mut rows[(outputs.start - own) * mean..][..count * mean];
        if !whole {
            biases.tile(outputs.clone(), from, to, memory, REACH, turned);
            let block = items.load(from, columns, side.items);
            for ((row, n), biases) in rows.chunks_exact_mut(mean).zip(outputs).zip(memory.chunks_exact(REACH)) {
                let (low, high) = window.seen(n);
                for item in low.max(from)..high.min(to) {
                    let column = (item - from) as usize;
                    join(row, &block[column * mean..][..mean], biases[column]);
                }
            }
            return true;
        }
        let kept = (outputs.len() == chunk_len).then_some((&mut *bias_tiles, (from - start) as usize));
        let memory = (&mut *memory, &mut running_max[..count]);
        let tile = bias_tile(biases, (outputs, from, to), kept, memory, turned);
        let (numerators, denominators) = side.factored.split_at_mut(REACH * width);
        let numerators = if with_numerators { numerators } else { &mut [] };
        let place = Factors { reference: side.reference, numerators, denominators };
        let block = items.blocks().and_then(|blocks| blocks.get(from, columns));
        let common = common.filter(|_| count == chunk_len && block.is_some());
        let (factored, depth) = factored(block, (*items, from, columns), place, side.items);
        if tile.range > widest() && depth > widest() {
            return false;
        }
        if let Some(reference) = common {
            sums.add(rows, reference, &tile, factored, columns);
            return true;
        }
        let BiasTile { weights, row, running_max, .. } = tile;
        let (numerators, denominators) = side.products.split_at_mut(REACH * width);
        for (b, c) in [(factored.numerators, &mut *numerators), (factored.denominators, &mut *denominators)]
            .into_iter()
            .skip(usize::from(!with_numerators))
        {
            let sizes = [count, width, columns];
            Product::of((weights, row), (b, width), (c, width), sizes).compute();
        }
        // What stands in the place of numerators is not looked at.
        let numerators = if with_numerators { &*numerators } else { &*denominators };
        let from = Factored { numerators, denominators, ..factored };
        dispatch(JoinFactored { to: rows, from, biases: running_max });
        true
    };
    for from in (start..end).step_by(REACH) {
        threads::check();
        cover(window, own..to, from, (from + REACH as isize).min(end), &mut tile);
    }
    if let Some(reference) = common {
        sums.join(rows, reference, chunk_len);
    }
    for (n, row) in (own..to).zip(rows.chunks_exact_mut(mean)) {
        if window.after {
            join(row, edges.1, T::ZERO);
        }
        visit(n, row, start, &[]);
    }
}

/// `Σ_channels p·(g·v − G·Y)` of some pairs, of one head or summed over some: rows of weights × rows of terms.
pub(super) struct PairGradients<'a, T> {
    first: usize,
    weights: &'a [T],
    /// From one row of weights to the next; rows of terms have [`REACH`].
    row: usize,
    terms: &'a [T],
}

impl<T: Real> PairGradients<'_, T> {
    /// Adds those of one output and as many items as `to` has room for, from a column on.
    pub fn add_to(&self, output: usize, column: usize, to: &mut [T]) {
        let row = output - self.first;
        let [x, y] = [(self.weights, self.row), (self.terms, REACH)].map(|(of, len)| &of[row * len + column..]);
        add_products(x, y, to);
    }
}

/// Forms `Σ_channels p·(g·v − G·Y)` of every pair of a chunk's rows with an item that has a bias, and hands them to
/// `visit(outputs, from, to, gradients)`; 0 where an output does not see an item. `of` gives the items of each of so many `heads`,
/// in transposed blocks, and the chunk's rows as these items see them. `bias_tiles` as for [`means`].
///
/// Tiles of whole chunks are summed over the heads, which have `e^{w − r}` in common. Of the blocks of items every `shares`-th is taken,
/// from the `share`-th on.
pub(super) fn bias_gradients<'r, T: Real, I: Items<T>>(
    (window, chunk, (share, shares)): (&Window, usize, (usize, usize)),
    biases: &Biases<'_, T>,
    (heads, of): (usize, impl Fn(usize) -> (I, &'r [T])),
    mut bias_tiles: Option<&mut BiasTiles<'_, T>>,
    work: &mut [T],
    mut visit: impl FnMut(Range<usize>, isize, isize, &PairGradients<'_, T>),
) {
    let (own, to_own) = window.chunk(chunk);
    let (start, end) = window.range(own, to_own);
    let mean = of(0).1.len() / (to_own - own);
    let Work { biases: memory, turned, running_max, mut side, .. } =
        Work::new(&mut Arena::new(work), mean, window.chunk_len);
    // Takes a tile of some heads, as `cover` asks for it. Returns those that did not take it.
    let mut tile = |heads: Range<usize>, outputs: Range<usize>, from: isize, to: isize, whole: bool| {
        let (first, count, columns) = (outputs.start, outputs.len(), (to - from) as usize);
        let rows_of = |rows: &'r [T]| &rows[(first - own) * mean..][..count * mean];
        if whole {
            let kept = bias_tiles.as_deref_mut().filter(|_| count == to_own - own);
            let kept = kept.map(|tiles| (tiles, (from - start) as usize));
            let memory = (&mut *memory, &mut running_max[..count]);
            let tile = bias_tile(biases, (outputs.clone(), from, to), kept, memory, turned);
            let (mut begun, mut left) = (false, Vec::new());
            for head in heads {
                let (items, rows) = of(head);
                if side.add_terms(&tile, (&items, from, columns), rows_of(rows), begun, turned) {
                    begun = true;
                } else {
                    left.push(head);
                }
            }
            if begun {
                let BiasTile { weights, row, .. } = tile;
                visit(outputs, from, to, &PairGradients { first, weights, row, terms: turned });
            }
            return left;
        }
        for head in heads {
            let (items, rows) = of(head);
            biases.tile(outputs.clone(), from, to, memory, REACH, turned);
            let block = items.load(from, columns, side.items);
            let pairs = rows_of(rows).chunks_exact(mean).zip(outputs.clone()).zip(memory.chunks_exact_mut(REACH));
            for ((row, n), biases) in pairs {
                let (low, high) = window.seen(n);
                for (item, (to, key)) in (from..).zip(biases.iter_mut().zip(block.chunks_exact(mean))) {
                    let seen = (low..high).contains(&item);
                    *to = if seen { dispatch(BiasGradient { row, key, bias: *to }) } else { T::ZERO };
                }
            }
            turned[..columns].fill(T::ONE);
            visit(outputs.clone(), from, to, &PairGradients { first, weights: turned, row: 0, terms: memory });
        }
        Vec::new()
    };
    for from in (start..end).step_by(REACH).skip(share).step_by(shares) {
        threads::check();
        let to = (from + REACH as isize).min(end);
        let outputs = own..to_own;
        let shared = window.all_see(&outputs, from, to) && outputs.len().min((to - from) as usize) >= LEAST;
        let left = if shared { tile(0..heads, outputs.clone(), from, to, true) } else { (0..heads).collect() };
        for head in left {
            let mut tile = |outputs, from, to, whole| tile(head..head + 1, outputs, from, to, whole).is_empty();
            cover(window, outputs.clone(), from, to, &mut tile);
        }
    }
}
