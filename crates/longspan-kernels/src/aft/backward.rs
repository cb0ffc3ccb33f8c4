//! Gradients, in two walks: over keys for every query, which finds the means again, and over queries for every key.
//!
//! The means of the forward pass are formed anew instead of kept: one number a channel would not do, since the logarithm
//! of a sum near 10⁴ has no digits left behind the point in `f32`, and reading two back costs what forming them does.

use std::ops::Range;

use super::forward::{bias_tiles_len, chunks, groups, key_edges, work_len};
use super::keys::KeyItems;
use super::problem::{Bias, Block, Chunks, Problem};
use super::state_gradient::{Links, far_item};
use super::tiles::{self, BiasTiles, BlockTable, Blocks, Parts, REACH, SIDE};
use super::walk::{Edges, Items, by_mean, clear, edges, join_all, walk};
use crate::aft::log_sum::{BiasGradient, KeyGradient, OutputRow, RowCotangent, join};
use crate::call::{Arena, Cotangent, Scratch, SharedRows, View, ViewMut};
use crate::simd::block::Transpose;
use crate::simd::product::{Band, Product};
use crate::simd::{Real, dispatch};
use crate::threads::{self, parallel};

/// Where the gradients of q, k and v go.
pub(super) struct GradientSink<'a, T> {
    pub dq: SharedRows<'a, T>,
    pub dk: SharedRows<'a, T>,
    pub dv: SharedRows<'a, T>,
}

/// Heads are dealt into at most so many groups, each with a sum of its own for the gradients of biases: a number that
/// does not depend on threads, so that neither do the bits.
pub(super) const GROUPS: usize = 16;

/// Numbers that the sums of all groups may take, if there is to be more than one.
const GROUP_NUMBERS: usize = 1 << 22;

/// Numbers that the rows of one block may take, if it has more than one head.
pub(super) const BLOCK_NUMBERS: usize = 1 << 20;

/// The same where heads have a table of biases in common: so many that it need not be read anew for each of them.
const SHARING_NUMBERS: usize = 1 << 23;

/// Rows as keys see them, one after the other.
struct RowItems<'a, T> {
    rows: &'a [T],
    mean: usize,
    blocks: Option<Blocks<'a, T>>,
}

impl<T: Real> Items<T> for RowItems<'_, T> {
    fn load<'b>(&'b self, from: isize, count: usize, _: &'b mut [T]) -> &'b [T] {
        &self.rows[from as usize * self.mean..][..count * self.mean]
    }

    fn blocks(&self) -> Option<Blocks<'_, T>> {
        self.blocks
    }

    fn start(&self, mean: &mut [T]) {
        clear(mean);
    }
}

/// The sums of the gradients of biases: `planes` of rows. Tasks are groups of heads × parts of chunks.
struct Sums {
    groups: usize,
    parts: usize,
    planes: usize,
    rows: usize,
    columns: usize,
}

impl Sums {
    fn new<T: Real>(problem: &Problem<'_, T>, units: usize, chunks: usize) -> Self {
        let (rows, columns, parts) = match &problem.bias {
            Bias::Zero | Bias::Kernel { .. } => {
                return Self { groups: units.max(1), parts: chunks, planes: 0, rows: 0, columns: 0 };
            }
            // Rows of a table belong to one chunk each.
            Bias::Rows { table, columns, .. } => (table.len() / columns, *columns, chunks),
            Bias::Table { table, length } => (table.len() / length, *length, chunks),
            // And all share the keys' factors: a range has a plane, of the queries' rows and then the keys'.
            Bias::LowRank(factors) => {
                let rows = 2 * factors.u.len() / factors.row;
                let parts = (GROUP_NUMBERS / (rows * factors.row).max(1)).clamp(1, GROUPS).min(chunks);
                return Self { groups: 1, parts, planes: parts, rows, columns: factors.row };
            }
        };
        let groups = (GROUP_NUMBERS / (rows * columns).max(1)).clamp(1, GROUPS).min(units.max(1));
        Self { groups, parts, planes: groups, rows, columns }
    }

    fn len(&self) -> usize {
        self.planes * self.rows * self.columns
    }
}

/// Writes every gradient.
pub(super) fn backward<'a, T: Real>(
    problem: &Problem<'a, T>,
    cotangent: &Cotangent<'a, T>,
    sink: &GradientSink<'_, T>,
    links: &Links<'_, T>,
    parameters: &mut [&mut [T]],
    scratch: &mut Scratch<T>,
) {
    let most = if problem.full() { SHARING_NUMBERS } else { BLOCK_NUMBERS };
    let blocks: Vec<Sides> = Block::all(problem, most).into_iter().map(|block| Sides::new(problem, block)).collect();
    let units = blocks.iter().map(|sides| sides.units(problem)).max().unwrap_or(0);
    let most_chunks = blocks.iter().map(Sides::most_chunks).max().unwrap_or(0);
    let sums = Sums::new(problem, units, most_chunks);
    // A table that has but one sum is that sum.
    let direct = matches!(problem.bias, Bias::Table { .. }) && sums.planes == 1;

    let per_worker = blocks.iter().map(|sides| sides.work_len(problem)).max().unwrap_or(0);
    let tasks = blocks.iter().map(|sides| sides.tasks(&sums)).max().unwrap_or(0);
    let workers = threads::count().min(tasks).max(1);
    let own = blocks.iter().map(|sides| sides.memory(problem)).max().unwrap_or(0);
    let sums_len = if direct { 0 } else { sums.len() };
    let wanted = workers * per_worker + own + sums_len.next_multiple_of(64) + 128;
    let mut arena = Arena::new(scratch.take(wanted));
    let work = arena.take(workers * per_worker);
    let planes = arena.take(sums_len);
    let memory = arena.rest();
    let d_bias = if direct { &mut *parameters[0] } else { &mut *planes };
    d_bias.fill(T::ZERO);
    for sides in &blocks {
        block(problem, cotangent, sink, links, sides, (&sums, &mut *d_bias), memory, work, per_worker);
    }
    if !direct {
        reduce(problem, &sums, planes, parameters);
    }
}

/// A block, and both sides of its pairs in chunks.
struct Sides {
    block: Block,
    /// Queries, once for each head of keys.
    by_key: Chunks,
    /// Keys, once for each head of queries.
    keys_by_query: Chunks,
    /// Keys, once for each head of keys.
    keys_by_key: Chunks,
}

impl Sides {
    fn new<T: Real>(problem: &Problem<'_, T>, block: Block) -> Self {
        let heads = block.heads.len();
        let keys = |heads| {
            let sequences = &problem.sequences[block.sequences.clone()];
            Chunks::new(sequences.iter().map(|sequence| problem.queries_of_keys(sequence)).collect(), heads)
        };
        Self {
            by_key: chunks(problem, block.sequences.clone(), heads),
            keys_by_query: keys(heads * problem.dims.group()),
            keys_by_key: keys(heads),
            block,
        }
    }

    /// Heads of queries of all sequences.
    fn units<T: Real>(&self, problem: &Problem<'_, T>) -> usize {
        self.block.sequences.len() * self.block.heads.len() * problem.dims.group()
    }

    fn most_chunks(&self) -> usize {
        self.by_key.windows.iter().map(|window| window.chunks()).max().unwrap_or(0)
    }

    fn work_len<T: Real>(&self, problem: &Problem<'_, T>) -> usize {
        let line = |len: usize| len.next_multiple_of(64);
        let walk = work_len(problem, &self.by_key).max(work_len(problem, &self.keys_by_key));
        walk + self.bias_tiles_len(problem) + line(3 * problem.mean())
    }

    fn bias_tiles_len<T: Real>(&self, problem: &Problem<'_, T>) -> usize {
        bias_tiles_len(problem, &self.by_key).max(bias_tiles_len(problem, &self.keys_by_key))
    }

    fn tasks(&self, sums: &Sums) -> usize {
        (sums.groups * sums.parts).max(self.keys_by_key.tasks()).max(self.by_key.tasks())
    }

    /// Rows of all units.
    fn rows<T: Real>(&self, problem: &Problem<'_, T>) -> usize {
        let queries = problem.sequences[self.block.sequences.clone()].iter().map(|s| s.queries).sum::<usize>();
        queries * self.block.heads.len() * problem.dims.group()
    }

    /// Numbers of memory beside that of workers.
    fn memory<T: Real>(&self, problem: &Problem<'_, T>) -> usize {
        let line = |len: usize| (len * problem.mean()).next_multiple_of(64);
        let block_tables = self.key_block_table(problem).len::<T>() + self.row_block_table(problem).len::<T>() + 128;
        2 * line(self.by_key.tasks()) + 2 * line(self.keys_by_query.tasks()) + line(self.rows(problem)) + block_tables
    }

    /// Keys in blocks, if every chunk of queries takes the same.
    fn key_block_table<T: Real>(&self, problem: &Problem<'_, T>) -> BlockTable {
        let windows = if problem.full() { &self.by_key.windows[..] } else { &[] };
        BlockTable::new(windows, self.block.heads.len(), problem.width)
    }

    /// The same of rows.
    fn row_block_table<T: Real>(&self, problem: &Problem<'_, T>) -> BlockTable {
        let windows = if problem.full() { &self.keys_by_query.windows[..] } else { &[] };
        BlockTable::new(windows, self.block.heads.len() * problem.dims.group(), problem.width)
    }

    /// The first row of each sequence, if the rows of all units stand one after the other.
    fn starts<T: Real>(&self, problem: &Problem<'_, T>) -> Vec<usize> {
        let heads = self.block.heads.len() * problem.dims.group();
        let sequences = problem.sequences[self.block.sequences.clone()].iter();
        let ends = sequences.scan(0, |start, sequence| {
            let own = *start;
            *start += sequence.queries * heads;
            Some(own)
        });
        ends.collect()
    }
}

/// Writes the gradients of one block, and adds to those of biases.
#[allow(clippy::too_many_arguments)]
fn block<'a, T: Real>(
    problem: &Problem<'a, T>,
    cotangent: &Cotangent<'a, T>,
    sink: &GradientSink<'_, T>,
    links: &Links<'_, T>,
    sides: &Sides,
    (sums, d_bias): (&Sums, &mut [T]),
    memory: &mut [T],
    work: &mut [T],
    per_worker: usize,
) {
    let (dims, mean) = (&problem.dims, problem.mean());
    let Sides { block, by_key, keys_by_query, keys_by_key } = sides;
    let mut arena = Arena::new(memory);
    let rows = arena.take(sides.rows(problem) * mean);
    let (before, after) = key_edges(problem, block, by_key, &mut arena, work);
    let block_table = sides.key_block_table(problem);
    let blocks = arena.take(block_table.len::<T>());
    let key_items = |index: usize, kv_head: usize| {
        KeyItems::new(problem, &problem.sequences[block.sequences.start + index], block.heads.start + kv_head)
    };
    block_table.fill(key_items, blocks, work, per_worker);
    let keys = (&block_table, &*blocks);
    query_side(problem, cotangent, sink, sides, keys, (before, after), (sums, d_bias), rows, work, per_worker);

    let rows: &[T] = rows;
    let starts = sides.starts(problem);
    // Heads of queries from the block's first on.
    let items = |index: usize, head: usize| {
        let queries = problem.sequences[block.sequences.start + index].queries;
        RowItems { rows: &rows[(starts[index] + head * queries) * mean..][..queries * mean], mean, blocks: None }
    };
    let block_table = sides.row_block_table(problem);
    let blocks = arena.take(block_table.len::<T>());
    block_table.fill(items, blocks, work, per_worker);
    let blocks = &*blocks;
    let (before, after) = (arena.take(keys_by_query.tasks() * mean), arena.take(keys_by_query.tasks() * mean));
    edges(keys_by_query, items, mean, Edges { before: &mut *before, after: &mut *after }, work);
    let (before, after): (&[T], &[T]) = (before, after);

    // The initial state's mean is a key without a value that every row sees.
    let far = if links.lends() { block.sequences.len() * block.heads.len() } else { 0 };
    parallel(far, work, per_worker, |task, work| {
        let (index, kv_head) = (task / block.heads.len(), task % block.heads.len());
        let sequence = &problem.sequences[block.sequences.start + index];
        let own_head = block.heads.start + kv_head;
        let (sum, work) = work.split_at_mut(mean);
        let (item, work) = work.split_at_mut(mean);
        clear(sum);
        for local in kv_head * dims.group()..(kv_head + 1) * dims.group() {
            join_all(&items(index, local), 0, sequence.queries as isize, sum, work);
        }
        if let Some(last) = links.last_item(sequence, own_head) {
            join(sum, last, T::ZERO);
        }
        // SAFETY: every head of every sequence has one task.
        let far = unsafe { links.far_gradient(problem, sequence.batch, own_head, 0..dims.head_dim) };
        let Some((head, numerator, denominator)) = far else { return };
        far_item(&head, problem.width, item);
        let (d_key, d_value) = work[..2 * problem.width].split_at_mut(problem.width);
        dispatch(KeyGradient { rows: sum, key: item, dk: d_key, dv: d_value });
        numerator.copy_from_slice(&d_value[..dims.head_dim]);
        denominator.copy_from_slice(&d_key[..dims.head_dim]);
    });

    let one = |index: usize,
               kv_head: usize,
               chunk: usize,
               mut bias_tiles: Option<&mut BiasTiles<'_, T>>,
               work: &mut [T]| {
        let sequence = &problem.sequences[block.sequences.start + index];
        let key_items = KeyItems::new(problem, sequence, block.heads.start + kv_head);
        let (own, work) = work.split_at_mut((3 * mean).next_multiple_of(64));
        let (key, own) = own.split_at_mut(mean);
        let (joined, gradients) = own.split_at_mut(mean);
        let lent = problem.lent(sequence) as isize;
        let (d_key, d_value) = gradients[..mean].split_at_mut(2 * problem.width);
        for local in kv_head * dims.group()..(kv_head + 1) * dims.group() {
            let first = local == kv_head * dims.group();
            let items = RowItems { blocks: block_table.of(blocks, index, local), ..items(index, local) };
            let edge = keys_by_query.index(index, local, chunk) * mean;
            let edges = (&before[edge..][..mean], &after[edge..][..mean]);
            let visit = |j: usize, sum: &[T]| {
                let j = j as isize - lent;
                let (at, head_dim) = ((sequence.key_start as isize + j) as usize, dims.head_dim);
                let own_head = block.heads.start + kv_head;
                // SAFETY: every key belongs to one chunk of one key head, and the slices end here.
                let places = unsafe {
                    if j < 0 {
                        links.ring_row(problem, sequence.batch, own_head, j.unsigned_abs())
                    } else {
                        let dk = sink.dk.row(sequence.batch, own_head, at, problem.key_dim);
                        Some((dk, sink.dv.row(sequence.batch, own_head, at, head_dim)))
                    }
                };
                let Some((dk, dv)) = places else { return };
                if first {
                    dk.fill(T::ZERO);
                    dv.fill(T::ZERO);
                }
                if key_items.token(j).is_none() {
                    return;
                }
                let mut sum = sum;
                if let Some(last) = links.leaving(sequence, own_head, j).filter(|_| first) {
                    joined.copy_from_slice(sum);
                    join(joined, last, T::ZERO);
                    sum = joined;
                }
                dispatch(KeyGradient { rows: sum, key: key_items.load(j, 1, key), dk: d_key, dv: d_value });
                dv.iter_mut().zip(&*d_value).for_each(|(to, &d)| *to += d);
                dk.iter_mut().zip(&*d_key).for_each(|(to, &d)| *to += d);
                if let Some((d_key, d_value)) = links.kept(problem, sequence, own_head, j).filter(|_| first) {
                    dv.iter_mut().zip(d_value).for_each(|(to, &d)| *to += d);
                    dk.iter_mut().zip(d_key).for_each(|(to, &d)| *to += d);
                }
            };
            let window = &keys_by_key.windows[index];
            if let Some(bias_tiles) = bias_tiles.as_deref_mut() {
                let bias = |keys: Range<usize>, from: isize, to: isize, tile: &mut [T], row: usize, spare: &mut [T]| {
                    let queries = from as usize..to as usize;
                    problem.tile(sequence, queries.clone(), keys.start as isize - lent, keys.len(), spare, SIDE);
                    dispatch(Transpose {
                        from: spare,
                        from_row: SIDE,
                        rows: queries.len(),
                        columns: keys.len(),
                        to: tile,
                        to_row: row,
                    });
                };
                tiles::means(&items, window, chunk, edges, Parts::All, bias, bias_tiles, work, visit);
            } else {
                let mut visit = visit;
                let bias = |key: usize, query: isize| problem.pair(sequence, query as usize, key as isize - lent);
                walk(&items, window, chunk, edges, bias, work, |j, sum, _, _| visit(j, sum));
            }
        }
    };
    let heads = block.heads.len();
    let groups = groups(problem, &keys_by_key.windows, heads);
    let tasks = Chunks::new(keys_by_key.windows.clone(), groups);
    let bias_tiles_len = sides.bias_tiles_len(problem);
    parallel(tasks.tasks(), work, per_worker, |task, work| {
        let (index, group, chunk) = tasks.task(task);
        let (bias_tiles, work) = work.split_at_mut(bias_tiles_len);
        let mut bias_tiles = (bias_tiles_len > 0).then(|| BiasTiles::new(bias_tiles));
        for kv_head in group * heads / groups..(group + 1) * heads / groups {
            one(index, kv_head, chunk, bias_tiles.as_mut(), work);
        }
    });
}

/// Gradients of queries, sums of those of biases, and the rows as keys see them.
#[allow(clippy::too_many_arguments)]
fn query_side<'a, T: Real>(
    problem: &Problem<'a, T>,
    cotangent: &Cotangent<'a, T>,
    sink: &GradientSink<'_, T>,
    sides: &Sides,
    (block_table, blocks): (&BlockTable, &[T]),
    (before, after): (&[T], &[T]),
    (sums, d_bias): (&Sums, &mut [T]),
    rows: &mut [T],
    work: &mut [T],
    per_worker: usize,
) {
    let (dims, mean) = (&problem.dims, problem.mean());
    let Sides { block, by_key, .. } = sides;
    let most_chunks = sides.most_chunks();
    let units = sides.units(problem);
    let heads = block.heads.len() * dims.group();
    let mut rows = by_mean(rows, mean);
    let rows = rows.shared();
    let mut d_bias = ViewMut::strided(d_bias, [0, sums.rows * sums.columns, sums.columns]);
    let d_bias = d_bias.shared();
    let starts = sides.starts(problem);
    let bias_tiles_len = sides.bias_tiles_len(problem);
    let one = |group: usize, plane: usize, chunk: usize, work: &mut [T]| {
        let (bias_tiles_memory, work) = work.split_at_mut(bias_tiles_len);
        // Heads of one sequence have the same biases.
        let mut bias_tiles = (bias_tiles_len > 0).then(|| BiasTiles::new(bias_tiles_memory));
        let mut bias_tiles_of = None;
        for unit in group * units / sums.groups..(group + 1) * units / sums.groups {
            let (index, local) = (unit / heads, unit % heads);
            let window = &by_key.windows[index];
            if chunk >= window.chunks() {
                continue;
            }
            let sequence = &problem.sequences[block.sequences.start + index];
            let head = block.heads.start * dims.group() + local;
            let kv_head = local / dims.group();
            let items = KeyItems::new(problem, sequence, block.heads.start + kv_head);
            let items = items.with(block_table.of(blocks, index, kv_head));
            let rows_of = |view: &View<'a, T>| view.rows(sequence.batch, head).skip(sequence.query_start);
            let (queries, d_outs) = (rows_of(&problem.call.q), rows_of(&cotangent.d_out));
            let outs = rows_of(&cotangent.out);
            let edge = by_key.index(index, kv_head, chunk) * mean;
            let edges = (&before[edge..][..mean], &after[edge..][..mean]);
            let first_row = starts[index] + local * sequence.queries;
            let visit = |i: usize, row: &[T]| -> &[T] {
                let output = OutputRow {
                    q: if problem.aft.gate { queries.row(i, dims.head_dim) } else { &[] },
                    d_out: d_outs.row(i, dims.head_dim),
                    out: outs.row(i, dims.head_dim),
                };
                // SAFETY: every row belongs to one chunk of one head, and the slices end before the next visit of it.
                let (dq, item) = unsafe {
                    (
                        sink.dq.row(sequence.batch, head, sequence.query_start + i, dims.head_dim),
                        rows.row(0, 0, first_row + i, mean),
                    )
                };
                dispatch(RowCotangent { mean: row, row: output, dq, item });
                item
            };
            let Some(bias_tiles) = &mut bias_tiles else {
                let bias = |query: usize, key: isize| problem.pair(sequence, query, key);
                walk(&items, window, chunk, edges, bias, work, |i, row, near, keys| {
                    let item = visit(i, row);
                    if keys.is_empty() {
                        return;
                    }
                    // SAFETY: the groups have planes of their own; a table's row belongs to one chunk of queries,
                    // whatever the head.
                    let to = unsafe { d_bias.row(0, plane, problem.bias_row(sequence, i), sums.columns) };
                    let first = (near - (i as isize + window.shift - window.back)) as usize;
                    for (key, n) in keys.chunks_exact(mean).zip(first..) {
                        let bias = problem.pair(sequence, i, i as isize + window.shift - window.back + n as isize);
                        to[n] += dispatch(BiasGradient { row: item, key, bias });
                    }
                });
                continue;
            };
            let bias = |queries: Range<usize>, from: isize, to: isize, tile: &mut [T], row: usize, _: &mut [T]| {
                problem.tile(sequence, queries, from, (to - from) as usize, tile, row);
            };
            if bias_tiles_of.replace(index) != Some(index) {
                bias_tiles.forget();
            }
            tiles::means(&items, window, chunk, edges, Parts::Denominators, bias, bias_tiles, work, |i, row| {
                visit(i, row);
            });
            let (from, to) = window.chunk(chunk);
            // SAFETY: the chunk's rows are one after the other, and nothing writes them any more.
            let own: &[T] = unsafe { rows.row(0, 0, first_row + from, (to - from) * mean) };
            let bias = |queries: Range<usize>, from: isize, to: isize, tile: &mut [T]| {
                problem.tile(sequence, queries, from, (to - from) as usize, tile, REACH);
            };
            let add = |queries: Range<usize>, from: isize, to: isize, tile: &[T]| {
                if let Bias::LowRank(factors) = &problem.bias {
                    // Queries before the first key have no row, and see nothing.
                    let unseen = (-(queries.start as isize + window.shift)).clamp(0, queries.len() as isize) as usize;
                    let (queries, tile) = (queries.start + unseen..queries.end, &tile[unseen * REACH..]);
                    if queries.is_empty() {
                        return;
                    }
                    // SAFETY: a range has a plane of its own, and one task.
                    let plane = unsafe { d_bias.row(0, plane, 0, sums.rows * sums.columns) };
                    let (d_u, d_z) = plane.split_at_mut(factors.u.len());
                    let key = (from + problem.origin(sequence)) as usize * factors.row;
                    let query = problem.bias_row(sequence, queries.start) * factors.row;
                    let count = (to - from) as usize;
                    let (of_queries, of_keys) = ((&mut d_u[query..], queries.len()), (&mut d_z[key..], count));
                    for (turned, (to, rows), (b, depth)) in [
                        (false, of_queries, (&factors.z[key..], count)),
                        (true, of_keys, (&factors.u[query..], queries.len())),
                    ] {
                        dispatch(Product {
                            a: tile,
                            a_row: if turned { 1 } else { REACH },
                            a_column: if turned { REACH } else { 1 },
                            b,
                            b_row: factors.row,
                            c: to,
                            c_row: factors.row,
                            rows,
                            columns: factors.row,
                            depth,
                            accumulate: true,
                            a_band: Band::ALL,
                            c_band: Band::ALL,
                        });
                    }
                    return;
                }
                for (i, tile) in queries.zip(tile.chunks_exact(REACH)) {
                    let (near, behind) = window.near(i);
                    let (near, behind) = (near.max(from), behind.min(to));
                    if near >= behind {
                        continue;
                    }
                    let origin = match problem.bias {
                        Bias::Table { .. } => -problem.origin(sequence),
                        _ => i as isize + window.shift - window.back,
                    };
                    // SAFETY: as for the walk.
                    let sums = unsafe { d_bias.row(0, plane, problem.bias_row(sequence, i), sums.columns) };
                    let sums = &mut sums[(near - origin) as usize..];
                    let tile = &tile[(near - from) as usize..(behind - from) as usize];
                    sums.iter_mut().zip(tile).for_each(|(to, &d)| *to += d);
                }
            };
            tiles::bias_gradients(&items, window, chunk, own, mean, bias, work, add);
        }
    };
    parallel(sums.groups * sums.parts, work, per_worker, |task, work| {
        let (group, range) = (task / sums.parts, task % sums.parts);
        let plane = if matches!(problem.bias, Bias::LowRank(_)) { range } else { group };
        for chunk in range * most_chunks / sums.parts..(range + 1) * most_chunks / sums.parts {
            one(group, plane, chunk, work);
        }
    });
}

/// Adds the groups' sums and hands them to the parameters.
fn reduce<T: Real>(problem: &Problem<'_, T>, sums: &Sums, d_bias: &[T], parameters: &mut [&mut [T]]) {
    if parameters.is_empty() {
        return;
    }
    if let Bias::LowRank(factors) = &problem.bias {
        // Rows without what fills them up to a cache line.
        for (n, parameter) in parameters.iter_mut().enumerate() {
            parameter.fill(T::ZERO);
            for plane in d_bias.chunks_exact(sums.rows * sums.columns) {
                let rows = plane[n * factors.u.len()..].chunks_exact(factors.row);
                for (to, row) in parameter.chunks_exact_mut(factors.rank).zip(rows) {
                    to.iter_mut().zip(row).for_each(|(to, &d)| *to += d);
                }
            }
        }
        return;
    }
    parameters[0].fill(T::ZERO);
    for part in d_bias.chunks_exact((sums.rows * sums.columns).max(1)) {
        parameters[0].iter_mut().zip(part).for_each(|(to, &d)| *to += d);
    }
}

/// Keys beyond the end of a sequence have gradient 0.
pub(super) fn clear_absent<T: Real>(problem: &Problem<'_, T>, sink: &GradientSink<'_, T>) {
    for sequence in &problem.sequences {
        for head in 0..problem.dims.kv_heads {
            for token in sequence.key_start + sequence.keys..sequence.key_start + sequence.keys + sequence.absent {
                // SAFETY: no task runs yet, and the slices end here.
                unsafe {
                    sink.dk.row(sequence.batch, head, token, problem.key_dim).fill(T::ZERO);
                    sink.dv.row(sequence.batch, head, token, problem.dims.head_dim).fill(T::ZERO);
                }
            }
        }
    }
}
