package audit

import (
	"fmt"
	"slices"
	"strconv"
	"strings"

	"golang.org/x/mod/sumdb/tlog"
)

// A tile holds TileWidth hashes of one level. The levels of the tree that lie between
// the levels of tiles are computed.
const (
	TileHeight = 8
	TileWidth  = 1 << TileHeight
)

// Tree is the right edge of a tree, from which the tree grows: of each level of tiles,
// the tile that is not full. Its zero value is the empty tree.
type Tree struct {
	Size  int64    `json:"size"`
	Edges [][]Hash `json:"edges"` // by level, fewer than TileWidth each
}

// Full receives a full tile. It must be durable before a head includes it.
type Full func(level int, n int64, tile []byte) error

// Append adds the hash of the next entry. If full fails, the tree is as before, so that
// the caller can repeat the call.
func (t *Tree) Append(h Hash, full Full) error {
	size, level := t.Size+1, 0
	for ; level < len(t.Edges) && len(t.Edges[level]) == TileWidth-1; level++ {
		hashes := append(slices.Clip(t.Edges[level]), h)
		if err := full(level, size>>(TileHeight*(level+1))-1, TileOf(hashes)); err != nil {
			return err
		}
		h = subtree(hashes)
	}
	if level == len(t.Edges) {
		t.Edges = append(t.Edges, nil)
	}
	t.Size, t.Edges[level] = size, append(t.Edges[level], h)
	clear(t.Edges[:level])
	return nil
}

// Root returns the hash of the tree. Of the empty tree it is the hash of nothing. It
// returns an error if the edges are not those of a tree of this size.
func (t *Tree) Root() (Hash, error) {
	for level := range max(len(t.Edges), 63/TileHeight+1) {
		have := 0
		if level < len(t.Edges) {
			have = len(t.Edges[level])
		}
		if want := int(t.Size >> (TileHeight * level) % TileWidth); have != want {
			return Hash{}, fmt.Errorf("tree of %d entries: level %d has %d hashes behind its last full tile, want %d", t.Size, level, have, want)
		}
	}
	if t.Size == 0 {
		return tlog.TreeHash(0, nil)
	}
	var peaks []Hash // of the full subtrees, from the left
	for level := len(t.Edges) - 1; level >= 0; level-- {
		edge := t.Edges[level]
		for width := TileWidth / 2; width > 0; width /= 2 {
			if len(edge) >= width {
				peaks = append(peaks, subtree(edge[:width]))
				edge = edge[width:]
			}
		}
	}
	root := peaks[len(peaks)-1]
	for i := len(peaks) - 2; i >= 0; i-- {
		root = tlog.NodeHash(peaks[i], root)
	}
	return root, nil
}

// subtree returns the root over a power of two of hashes.
func subtree(hashes []Hash) Hash {
	if len(hashes) == 1 {
		return hashes[0]
	}
	half := len(hashes) / 2
	return tlog.NodeHash(subtree(hashes[:half]), subtree(hashes[half:]))
}

// TileOf returns the bytes of a tile.
func TileOf(hashes []Hash) []byte {
	b := make([]byte, 0, len(hashes)*tlog.HashSize)
	for _, h := range hashes {
		b = append(b, h[:]...)
	}
	return b
}

// TileRoot returns the hash over a full tile, which is one hash of the level above.
func TileRoot(tile []byte) (Hash, error) {
	if len(tile) != TileWidth*tlog.HashSize {
		return Hash{}, fmt.Errorf("tile: it has %d bytes, want %d", len(tile), TileWidth*tlog.HashSize)
	}
	hashes := make([]Hash, TileWidth)
	for i := range hashes {
		hashes[i] = Hash(tile[i*tlog.HashSize:])
	}
	return subtree(hashes), nil
}

// Entries is the level of the bundles of entries in [TilePath].
const Entries = -1

// TilePath returns the path of a tile, or of a bundle of entries, below the directory of
// a log in the form of C2SP tlog-tiles: tile/<level>/x001/x234/067, and .p/<width> after
// the number of a tile that is not full.
func TilePath(level int, n int64, width int) string {
	path := fmt.Sprintf("%03d", n%1000)
	for n >= 1000 {
		n /= 1000
		path = fmt.Sprintf("x%03d/%s", n%1000, path)
	}
	what := "entries"
	if level != Entries {
		what = strconv.Itoa(level)
	}
	path = "tile/" + what + "/" + path
	if width < TileWidth {
		path += ".p/" + strconv.Itoa(width)
	}
	return path
}

// maxTile is the number of a tile whose entries have indexes that fit an int64.
const maxTile = 1 << 46

// ParseTilePath is the inverse of [TilePath]: it accepts no other spelling, and no tile of
// more entries than a log can have.
func ParseTilePath(path string) (level int, n int64, width int, err error) {
	bad := func() (int, int64, int, error) { return 0, 0, 0, fmt.Errorf("%q is not the path of a tile", path) }
	rest, ok := strings.CutPrefix(path, "tile/")
	what, rest, ok2 := strings.Cut(rest, "/")
	if !ok || !ok2 {
		return bad()
	}
	level = Entries
	if what != "entries" {
		if level, err = strconv.Atoi(what); err != nil || level < 0 || level > 63/TileHeight {
			return bad()
		}
	}
	width = TileWidth
	if number, w, partial := strings.Cut(rest, ".p/"); partial {
		rest = number
		if width, err = strconv.Atoi(w); err != nil || width < 1 || width >= TileWidth {
			return bad()
		}
	}
	for _, part := range strings.Split(rest, "/") {
		digit, err := strconv.Atoi(strings.TrimPrefix(part, "x"))
		if err != nil || digit < 0 || n > 1<<52 {
			return bad()
		}
		n = n*1000 + int64(digit)
	}
	if n > maxTile || TilePath(level, n, width) != path {
		return bad()
	}
	return level, n, width, nil
}
