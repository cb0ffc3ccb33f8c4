//! Gradients, in two walks: over keys for every query, which finds the means again, and over queries for every key.
//!
//! With a table of all biases the means' exponents and denominators are those that the forward kept (`forward::KEPT`); forming them anew
//! would be a product of `2·head_dim` operations a pair. Windows form theirs anew.

use super::chunks::{Chunks, Window, Workers};
use super::forward::read_kept;
use super::gradients::{BLOCK_NUMBERS, Backward, GROUPS};
use super::items::{BlockTable, Blocks, Items, REACH, join_all};
use super::keys::KeyItems;
use super::log_sum::{BiasGradient, clear, join};
use super::means::{HeadGroups, KeySide, bias_tiles_len, work_len};
use super::outputs::{PullBackMean, PullBackTokens, TokenGradients};
use super::problem::{Bias, Block, Problem};
use super::tiles::{self, BiasTiles};
use super::tokens::Tokens;
use super::walk::{Biases, Edges, Outputs};
use crate::call::{Arena, Scratch, SharedRows};
use crate::simd::product::Product;
use crate::simd::rows::Columns;
use crate::simd::{Real, dispatch};
use crate::threads::{self, share_many};

/// Numbers that the sums of all groups may take, if there is to be more than one.
const GROUP_NUMBERS: usize = 1 << 22;

/// Tasks that a table's gradients are dealt into at the least, if there are so many heads.
const TASKS: usize = 64;

/// As [`BLOCK_NUMBERS`], where heads have a table of biases in common: so many that it need not be read anew for each of them.
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

/// The sums of the gradients of biases: `planes` of rows. Tasks are groups of heads × parts of chunks × shares.
struct Sums {
    groups: usize,
    parts: usize,
    /// Of the blocks of keys of a table, which have gradients of their own.
    shares: usize,
    planes: usize,
    rows: usize,
    columns: usize,
}

impl Sums {
    fn new<T: Real>(problem: &Problem<'_, T>, units: usize, chunks: usize) -> Self {
        let (rows, columns) = match &problem.bias {
            Bias::Zero | Bias::Kernel { .. } => {
                return Self { groups: units.max(1), parts: chunks, shares: 1, planes: 0, rows: 0, columns: 0 };
            }
            // Rows of a table belong to one chunk each.
            Bias::Rows { table, columns, .. } => (table.len() / columns, *columns),
            Bias::Table { table, length } => (table.len() / length, *length),
            // And all share the keys' factors: a range of chunks has a plane, of the queries' rows and then the keys'.
            Bias::LowRank(factors) => {
                let rows = 2 * factors.u.len() / factors.row;
                let parts = (GROUP_NUMBERS / (rows * factors.row).max(1)).clamp(1, GROUPS).min(chunks);
                return Self { groups: 1, parts, shares: 1, planes: parts, rows, columns: factors.row };
            }
        };
        // A chunk has the same rows of the table in every sequence, or one task takes all.
        let place = |sequence| (problem.origin(sequence), problem.keys_of_queries(sequence).chunk_len);
        let aligned = problem.sequences.windows(2).all(|two| place(&two[0]) == place(&two[1]));
        let parts = if aligned { chunks } else { 1 };
        // A table's blocks are shares of work, so that it needs no more groups than leave some for all threads.
        let (blocks, wanted) = match problem.bias {
            Bias::Table { .. } => {
                let blocks = columns.div_ceil(REACH).max(1);
                (blocks, TASKS.div_ceil((parts * blocks).max(1)))
            }
            _ => (1, GROUPS),
        };
        let groups = (GROUP_NUMBERS / (rows * columns).max(1)).min(wanted).clamp(1, GROUPS).min(units.max(1));
        let shares = (4 * threads::count()).div_ceil((groups * parts).max(1)).min(blocks);
        Self { groups, parts, shares, planes: groups, rows, columns }
    }

    fn plane(&self) -> usize {
        self.rows * self.columns
    }

    fn tasks(&self) -> usize {
        self.groups * self.parts * self.shares
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
    /// The first row of each sequence, and how many there are in all.
    starts: Vec<usize>,
    rows: usize,
}

impl Sides {
    fn new<T: Real>(problem: &Problem<'_, T>, block: Block) -> Self {
        let heads = block.heads.len();
        let keys = |heads| {
            let windows = block.sequences(problem).iter().map(|sequence| problem.queries_of_keys(sequence));
            Chunks::new(windows.collect(), heads)
        };
        let (starts, rows) = block.rows(problem);
        Self {
            by_key: KeySide::chunks(problem, &block, heads),
            keys_by_query: keys(block.query_heads(problem)),
            keys_by_key: keys(heads),
            block,
            starts,
            rows,
        }
    }

    /// Heads of queries of all sequences.
    fn units<T: Real>(&self, problem: &Problem<'_, T>) -> usize {
        self.block.sequences.len() * self.block.query_heads(problem)
    }

    fn most_chunks(&self) -> usize {
        self.by_key.windows.iter().map(|window| window.chunks()).max().unwrap_or(0)
    }

    fn bias_tiles_len<T: Real>(&self, problem: &Problem<'_, T>) -> usize {
        bias_tiles_len(problem, &self.by_key).max(bias_tiles_len(problem, &self.keys_by_key))
    }

    /// Numbers of memory of one worker: two means, or a tile of a low rank's gradients, more than a walk takes.
    fn work_len<T: Real>(&self, problem: &Problem<'_, T>) -> usize {
        let walk = work_len(problem, &self.by_key).max(work_len(problem, &self.keys_by_key));
        walk + self.bias_tiles_len(problem) + (2 * problem.mean()).max(self.low_rank_len(problem))
    }

    /// Numbers of a tile of gradients before they are multiplied by the factors of a low rank.
    fn low_rank_len<T: Real>(&self, problem: &Problem<'_, T>) -> usize {
        let chunk_len = |window: &Window| window.chunk_len;
        let longest = self.by_key.windows.iter().map(chunk_len).max().unwrap_or(0);
        if matches!(problem.bias, Bias::LowRank(_)) { longest * REACH } else { 0 }
    }

    fn tasks<T: Real>(&self, problem: &Problem<'_, T>, sums: &Sums) -> usize {
        let rows = self.units(problem) * self.most_chunks();
        sums.tasks().max(self.keys_by_key.tasks()).max(rows)
    }

    /// Rows in blocks, if every chunk of keys takes the same.
    fn row_table<T: Real>(&self, problem: &Problem<'_, T>) -> BlockTable {
        let windows = if problem.full() { &self.keys_by_query.windows[..] } else { &[] };
        BlockTable::new(windows, self.keys_by_query.heads, problem.width)
    }

    /// Numbers of memory beside that of workers.
    fn memory<T: Real>(&self, problem: &Problem<'_, T>) -> usize {
        Arena::<T>::measure(|arena| {
            arena.take(self.rows * problem.mean());
            KeySide::memory(problem, &self.by_key, arena);
            arena.take(self.row_table(problem).len::<T>());
            Edges::memory(&self.keys_by_query, problem.mean(), arena);
        })
    }
}

pub(super) fn backward<T: Real>(call: &Backward<'_, T>, parameters: &mut [&mut [T]], scratch: &mut Scratch<T>) {
    let problem = call.problem;
    let most = if problem.full() { SHARING_NUMBERS } else { BLOCK_NUMBERS };
    let blocks: Vec<Sides> = Block::all(problem, most).into_iter().map(|block| Sides::new(problem, block)).collect();
    let largest = |of: &dyn Fn(&Sides) -> usize| blocks.iter().map(of).max().unwrap_or(0);
    let sums = Sums::new(problem, largest(&|sides| sides.units(problem)), largest(&Sides::most_chunks));
    // A table that has but one sum is that sum.
    let direct = matches!(problem.bias, Bias::Table { .. }) && sums.planes == 1;
    let (tasks, each) = (largest(&|sides| sides.tasks(problem, &sums)), largest(&|sides| sides.work_len(problem)));
    let own = largest(&|sides| sides.memory(problem));
    let sums_len = if direct { 0 } else { sums.planes * sums.plane() };
    let memory = Arena::<T>::measure(|arena| {
        Workers::new(tasks, each, arena);
        (arena.take(sums_len), arena.take(own))
    });
    let mut arena = Arena::new(scratch.take(memory));
    let mut workers = Workers::new(tasks, each, &mut arena);
    let (planes, memory) = (arena.take(sums_len), arena.take(own));
    let d_bias = if direct { &mut *parameters[0] } else { &mut *planes };
    share_many(d_bias.len(), d_bias.chunks_mut(1 << 16), |piece| piece.fill(T::ZERO));
    for sides in &blocks {
        let d_bias = SharedRows::new(&mut *d_bias, [0, sums.plane(), sums.columns]);
        block(call, sides, (&sums, d_bias), memory, &mut workers);
    }
    if !direct {
        reduce(problem, &sums, planes, parameters);
    }
}

/// Writes the gradients of one block, and adds to those of biases.
fn block<T: Real>(
    call: &Backward<'_, T>,
    sides: &Sides,
    sums: (&Sums, SharedRows<'_, T>),
    memory: &mut [T],
    workers: &mut Workers<'_, T>,
) {
    let problem = call.problem;
    let (dims, mean) = (&problem.dims, problem.mean());
    let Sides { block, by_key, keys_by_query, keys_by_key, starts, .. } = sides;
    let mut arena = Arena::new(memory);
    let rows = arena.take(sides.rows * mean);
    let keys = KeySide::new(problem, block, by_key, true, &mut arena, workers);
    query_side(call, sides, &keys, sums, rows, workers);

    let rows: &[T] = rows;
    let sequences = block.sequences(problem);
    // Heads of queries from the block's first on.
    let items = |index: usize, head: usize| {
        let queries = sequences[index].queries;
        RowItems { rows: &rows[(starts[index] + head * queries) * mean..][..queries * mean], mean, blocks: None }
    };
    let table = sides.row_table(problem);
    let blocks = arena.take(table.len::<T>());
    table.fill(items, false, blocks, workers);
    let blocks = &*blocks;
    let edges = Edges::new(keys_by_query, items, mean, &mut arena, workers);

    // The initial state's mean is a key without a value that every row sees.
    let far = if problem.lend { sequences.len() * block.heads.len() } else { 0 };
    workers.run(far, |task, work| {
        let (index, kv_head) = (task / block.heads.len(), task % block.heads.len());
        let (sequence, own_head) = (&sequences[index], block.heads.start + kv_head);
        let (sum, work) = work.split_at_mut(mean);
        let (zeros, work) = work.split_at_mut(mean);
        clear(sum);
        zeros.fill(T::ZERO);
        for local in dims.heads_of(kv_head) {
            join_all(&items(index, local), 0, sequence.queries as isize, sum, work);
        }
        if let Some(last) = call.last_item(sequence, own_head) {
            join(sum, last, T::ZERO);
        }
        // SAFETY: every head of every sequence has one task.
        let far = unsafe { call.far_gradient(sequence, own_head, 0..dims.head_dim) };
        let Some((head, numerator, denominator)) = far else { return };
        add_token((head.exponent, &zeros[..dims.head_dim]), sum, denominator, numerator, false);
    });

    let groups = HeadGroups::new(problem, &keys_by_key.windows, block.heads.len());
    groups.run(sides.bias_tiles_len(problem), workers, |index, kv_head, chunk, mut bias_tiles, work| {
        let (sequence, own_head) = (&sequences[index], block.heads.start + kv_head);
        let key_items = KeyItems::new(problem, sequence, own_head);
        let (joined, work) = work.split_at_mut(mean);
        let lent = problem.lent(sequence) as isize;
        for local in dims.heads_of(kv_head) {
            let first = local == dims.heads_of(kv_head).start;
            let items = RowItems { blocks: table.of(blocks, index, local), ..items(index, local) };
            let outputs = Outputs {
                items: &items,
                biases: Biases { problem, sequence, lent: Some(lent) },
                window: &keys_by_key.windows[index],
                chunk,
                edges: edges.of(keys_by_query.index(index, local, chunk)),
            };
            tiles::means(&outputs, true, bias_tiles.as_deref_mut(), work, |j, sum, _, _| {
                let mut sum: &[T] = sum;
                let key = j as isize - lent;
                if let Some(last) = call.leaving(sequence, own_head, key).filter(|_| first) {
                    joined.copy_from_slice(sum);
                    join(joined, last, T::ZERO);
                    sum = joined;
                }
                let add = |token: (&[T], &[T]), dk: &mut [T], dv: &mut [T]| add_token(token, sum, dk, dv, true);
                // SAFETY: every key belongs to one chunk of one key head.
                unsafe { call.add_to_key(&key_items, sequence, own_head, key, first, add) };
            });
        }
    });
}

/// Writes the gradients of one key and its value from the rows that see them, or adds them.
fn add_token<T: Real>((key, value): (&[T], &[T]), rows: &[T], dk: &mut [T], dv: &mut [T], add: bool) {
    let to = TokenGradients { dk: Columns::single(dk), dv: Columns::single(dv), add };
    dispatch(PullBackTokens { tokens: Tokens::single(key, value), rows, to });
}

/// Gradients of queries, sums of those of biases, and the rows as keys see them.
fn query_side<T: Real>(
    call: &Backward<'_, T>,
    sides: &Sides,
    keys: &KeySide<'_, '_, T>,
    (sums, d_bias): (&Sums, SharedRows<'_, T>),
    rows: &mut [T],
    workers: &mut Workers<'_, T>,
) {
    let problem = call.problem;
    let (dims, mean) = (&problem.dims, problem.mean());
    let Sides { block, by_key, starts, .. } = sides;
    let (most_chunks, units) = (sides.most_chunks(), sides.units(problem));
    let heads = block.query_heads(problem);
    let rows = SharedRows::new(rows, [0, 0, mean]);
    // Writes `dq` of a row, and the row as its keys see it.
    let pull_back = |index: usize, local: usize, i: usize, mean_of_row: &[T]| {
        let sequence = &block.sequences(problem)[index];
        let head = block.heads.start * dims.group() + local;
        let row = starts[index] + local * sequence.queries + i;
        // SAFETY: every row belongs to one chunk of one head, and the slices end before the next visit of it.
        let (dq, item) = unsafe {
            let dq = call.dq.row(sequence.batch, head, sequence.query_start + i, dims.head_dim);
            (dq, rows.row(0, 0, row, mean))
        };
        let own = call.rows(sequence, head, i, 1, 0);
        dispatch(PullBackMean { mean: mean_of_row, rows: own, item: &mut *item, dq: Columns::single(dq) });
        &*item
    };
    if problem.full() {
        workers.run(units * most_chunks, |task, work| {
            let (unit, chunk) = (task / most_chunks, task % most_chunks);
            let (index, local) = (unit / heads, unit % heads);
            let sequence = &block.sequences(problem)[index];
            let mean_of_row = &mut work[..mean];
            mean_of_row.fill(T::ZERO);
            let (from, to) = by_key.windows[index].chunk(chunk);
            for i in from..to {
                let head = block.heads.start * dims.group() + local;
                let kept = call.kept(sequence.batch, head, sequence.query_start + i);
                read_kept(kept, dims.head_dim, mean_of_row);
                pull_back(index, local, i, mean_of_row);
            }
        });
    }
    let bias_tiles_len = sides.bias_tiles_len(problem);
    // A chunk of the heads of a group, which share what biases have in common, or a share of its blocks of keys.
    let one = |group: usize, plane: usize, chunk: usize, share: (usize, usize), work: &mut [T]| {
        let (bias_tiles_memory, work) = work.split_at_mut(bias_tiles_len);
        let (tile, work) = work.split_at_mut(sides.low_rank_len(problem));
        let (mut unit, end) = (group * units / sums.groups, (group + 1) * units / sums.groups);
        while unit < end {
            let (index, first) = (unit / heads, unit % heads);
            let locals = first..heads.min(first + end - unit);
            unit += locals.len();
            let window = &by_key.windows[index];
            if chunk >= window.chunks() {
                continue;
            }
            let sequence = &block.sequences(problem)[index];
            let biases = Biases { problem, sequence, lent: None };
            let (from, to) = window.chunk(chunk);
            let mut bias_tiles =
                if problem.full() { None } else { BiasTiles::new(bias_tiles_memory, window.chunk_len) };
            for local in locals.clone().filter(|_| !problem.full()) {
                let kv_head = local / dims.group();
                let items = keys.items(index, kv_head);
                let outputs = keys.outputs(&items, index, kv_head, chunk);
                let visit = |i: usize, mean_of_row: &[T], near: isize, keys: &[T]| {
                    let row = pull_back(index, local, i, mean_of_row);
                    if keys.is_empty() {
                        return;
                    }
                    // SAFETY: the groups have planes of their own; a table's row belongs to one chunk of queries,
                    // whatever the head.
                    let to = unsafe { d_bias.row(0, plane, problem.bias_row(sequence, i), sums.columns) };
                    let first = near - (i as isize + window.shift - window.back);
                    for (key, n) in keys.chunks_exact(mean).zip(0..) {
                        let bias = biases.pair(i, near + n);
                        to[(first + n) as usize] += dispatch(BiasGradient { row, key, bias });
                    }
                };
                tiles::means(&outputs, false, bias_tiles.as_mut(), work, visit);
            }
            if !problem.aft.tiled(problem.causal) {
                continue;
            }
            let of_head = |n: usize| {
                let local = locals.start + n;
                let first = starts[index] + local * sequence.queries + from;
                // SAFETY: the chunk's rows are one after the other, and nothing writes them any more.
                let own = unsafe { rows.read(0, 0, first, (to - from) * mean) };
                (keys.items(index, local / dims.group()), own)
            };
            let heads = (locals.len(), of_head);
            tiles::bias_gradients(
                (window, chunk, share),
                &biases,
                heads,
                bias_tiles.as_mut(),
                work,
                |queries, from, to, pairs| {
                    if let Bias::LowRank(factors) = &problem.bias {
                        // Queries before the first key have no row, and see nothing.
                        let unseen =
                            (-(queries.start as isize + window.shift)).clamp(0, queries.len() as isize) as usize;
                        let queries = queries.start + unseen..queries.end;
                        if queries.is_empty() {
                            return;
                        }
                        for (i, line) in queries.clone().zip(tile.chunks_exact_mut(REACH)) {
                            let line = &mut line[..(to - from) as usize];
                            line.fill(T::ZERO);
                            pairs.add_to(i, 0, line);
                        }
                        let tile = &*tile;
                        // SAFETY: a range has a plane of its own, and one task.
                        let plane = unsafe { d_bias.row(0, plane, 0, sums.plane()) };
                        let (d_u, d_z) = plane.split_at_mut(factors.u.len());
                        let row = factors.row;
                        let key = (from + problem.origin(sequence)) as usize * row;
                        let query = problem.bias_row(sequence, queries.start) * row;
                        let (rows, count) = (queries.len(), (to - from) as usize);
                        let (u, z) = ((&factors.u[query..], row), (&factors.z[key..], row));
                        for product in [
                            Product::of((tile, REACH), z, (&mut d_u[query..], row), [rows, row, count]),
                            Product::of_transposed((tile, REACH), u, (&mut d_z[key..], row), [count, row, rows]),
                        ] {
                            product.accumulate(true).compute();
                        }
                        return;
                    }
                    for i in queries {
                        let (near, behind) = window.near(i);
                        let (near, behind) = (near.max(from), behind.min(to));
                        if near >= behind {
                            continue;
                        }
                        let origin = match problem.bias {
                            Bias::Table { .. } => -problem.origin(sequence),
                            _ => i as isize + window.shift - window.back,
                        };
                        let columns = (near - origin) as usize..(behind - origin) as usize;
                        // SAFETY: as for the walk, and these columns belong to one share.
                        let mut to = unsafe { d_bias.columns([0, plane, problem.bias_row(sequence, i)], 1, columns) };
                        pairs.add_to(i, (near - from) as usize, to.row(0));
                    }
                },
            );
        }
    };
    workers.run(sums.tasks(), |task, work| {
        let (task, share) = (task / sums.shares, (task % sums.shares, sums.shares));
        let (group, range) = (task / sums.parts, task % sums.parts);
        let plane = if matches!(problem.bias, Bias::LowRank(_)) { range } else { group };
        for chunk in range * most_chunks / sums.parts..(range + 1) * most_chunks / sums.parts {
            one(group, plane, chunk, share, work);
        }
    });
}

/// Adds the groups' sums and hands them to the parameters.
fn reduce<T: Real>(problem: &Problem<'_, T>, sums: &Sums, d_bias: &[T], parameters: &mut [&mut [T]]) {
    // Rows of a low rank stand in whole cache lines.
    let (row, rank) = match &problem.bias {
        Bias::LowRank(factors) => (factors.row, factors.rank),
        _ => (sums.columns.max(1), sums.columns.max(1)),
    };
    let mut start = 0;
    for parameter in parameters {
        parameter.fill(T::ZERO);
        let len = parameter.len() / rank * row;
        for plane in d_bias.chunks_exact(sums.plane().max(1)) {
            for (to, from) in parameter.chunks_exact_mut(rank).zip(plane[start..start + len].chunks_exact(row)) {
                to.iter_mut().zip(from).for_each(|(to, &d)| *to += d);
            }
        }
        start += len;
    }
}
