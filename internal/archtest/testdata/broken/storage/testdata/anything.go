package anything
